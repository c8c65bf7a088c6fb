"""Measurements of the running program: each module is a command, `python -m bench.<name> --help`."""
