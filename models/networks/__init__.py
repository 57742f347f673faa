"""The trainable networks, their initial weights, INT4 rounding, and the checkpoint format."""
