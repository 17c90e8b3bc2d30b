"""The window: the fold over micro-batches, from a batch and a loss to one `WindowSums`."""
