"""Combining: losses that do not split, as functions of outputs combined over a window."""
