"""Placement rules on a simulated fleet."""
