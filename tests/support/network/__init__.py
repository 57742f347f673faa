"""Loopback ports, proxies that inject faults, and peers of tests on the network."""
