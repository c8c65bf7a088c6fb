"""Ours beside other programs, each in an environment of its own."""
