"""Tensors at rest: ragged buffers that really shrink, quantized ones, a pool of rows, checkpoints."""
