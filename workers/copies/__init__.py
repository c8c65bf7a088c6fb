"""Copies of tensors on their way to host memory, for which the training thread does not wait."""
