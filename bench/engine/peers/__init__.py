"""Other engines. A child process runs each with the Python of that engine's venv.

Must not import anything of the project beside this package: that Python does not have what the project needs.
"""
