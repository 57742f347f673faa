"""Fuzzed inputs to the processes of a real cluster. The fuzzers are those of the tests."""
