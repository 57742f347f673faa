"""Clusters of real or fake services, the gate that holds their engines, and streams under a fault."""
