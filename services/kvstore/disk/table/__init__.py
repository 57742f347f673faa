"""Which slot of a disk holds which block. Pure."""
