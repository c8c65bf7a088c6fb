"""Whole training runs behind slow lines (`diloco bench lines`)."""
