"""Attention over ragged caches: torch references, Triton kernels, and `dispatch`, which chooses between them."""
