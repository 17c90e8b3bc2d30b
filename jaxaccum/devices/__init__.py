"""The devices: the fold over them, one reduction of local sums at the window's end."""
