"""Conversion of tensors to bytes and back: codecs and chunks. Pure."""
