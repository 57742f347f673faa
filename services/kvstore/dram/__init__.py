"""The memory tier."""
