"""Tensors as bytes: codecs and chunks. Pure."""
