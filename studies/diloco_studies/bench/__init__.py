"""Measurements of the running program: `diloco bench`, and commands of their own.

These are `python -m diloco_studies.bench.<name> --help`.
"""
