"""The cases of the device report: inputs of a size, a run over them, and its figure.

Sections and the report import it, and it imports neither.
"""
