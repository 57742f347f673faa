"""Measures the kernels of a CUDA device against its ceilings, in one run: `make gpu-report`."""
