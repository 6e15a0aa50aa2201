"""Token scores: (Observation, budget) -> [kv_heads, n] float32, higher is kept first.

A scorer may have `step`, the same for a decode step, and the traits of `ScorerTraits` (compress/protocols.py).
"""
