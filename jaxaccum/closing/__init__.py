"""The end of a window: judge its sums, divide them, run the optimizer once, hand over."""
