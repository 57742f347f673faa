"""Bytes and FLOPs that programs and whole steps cannot do without, from shapes alone. Pure."""
