"""Asynchronous copies of tensors to host memory, for which the training thread does not wait."""
