"""Layer 2: how a sum is carried."""
