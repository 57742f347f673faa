"""Decisions about running requests: when to retry, hedge, quarantine, move and start. Imports no I/O."""
