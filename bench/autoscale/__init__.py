"""The size of each tier over a day of traffic, at a virtual clock."""
