"""Checks of a learner's model and arguments, at the start and during the training."""
