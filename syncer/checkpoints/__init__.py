"""Checkpoints: a run's state is saved fragment by fragment on a disk or in an object store, and restored from there."""
