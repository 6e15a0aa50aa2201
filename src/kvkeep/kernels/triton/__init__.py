"""The reference's functions as Triton kernels: same names, same arguments, same results."""
