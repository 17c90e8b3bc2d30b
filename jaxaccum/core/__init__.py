"""Layer 1: the monoid, its marks and its division; argument checks; JAX version differences."""
