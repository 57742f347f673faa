"""Measures what separate tiers and session affinity change for agents, with everything else the same."""
