"""The stream: the fold over many calls of `update`, a window across them."""
