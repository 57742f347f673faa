"""Slipstream: a cluster that serves Kimi-K2.5-class models."""
