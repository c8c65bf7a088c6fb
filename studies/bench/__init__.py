"""Measurements of the running program: `diloco bench`, and commands of their own, `python -m bench.<name> --help`."""
