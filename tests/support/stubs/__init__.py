"""Small servers and clients of one contract, in place of a whole service."""
