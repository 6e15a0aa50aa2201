"""Tensors at rest: ragged and quantized layers, buffers of a row pool, offloading, checkpoints."""
