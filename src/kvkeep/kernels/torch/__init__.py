"""The torch implementation of every kernel: the specification that the Triton kernels must equal."""
