"""The memory of a router under clients without a key."""
