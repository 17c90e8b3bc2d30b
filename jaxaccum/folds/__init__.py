"""Layer 3: cutting a batch, folding its micro-batches, and the streaming transformation."""
