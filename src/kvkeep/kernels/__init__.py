"""Attention over ragged caches. `reference` (plain torch) is the specification; faster versions must equal it."""
