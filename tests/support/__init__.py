"""Helpers of several test folders; product code does not import them."""
