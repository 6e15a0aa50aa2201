"""Queries, keys and values in, what to keep out: pure functions of tensors, one folder per axis of a method."""
