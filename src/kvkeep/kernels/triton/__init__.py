"""Triton kernels of the torch functions: same names, same arguments, same results."""
