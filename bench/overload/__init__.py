"""Goodput, refusals and fairness of a router under more requests than it has room for."""
