"""Which tokens to keep, given queries, keys and values: pure functions of tensors, one folder per axis of a method."""
