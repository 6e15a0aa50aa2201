"""Attention over ragged caches: plain torch (the specification), Triton, and `dispatch`, which chooses."""
