"""Triton kernels of the torch functions: same names, same arguments, same results.

Types, shapes and defaults of the arguments stand with the torch function. What is not given is None in a kernel too,
which is then compiled without it.
"""
