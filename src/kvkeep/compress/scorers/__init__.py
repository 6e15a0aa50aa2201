"""Token scores: (Observation, budget) -> [kv_heads, n] float32, higher is kept first.

A scorer may have `step`, the same for a decode step; `needs_attention`, False if that does not use logits and probs;
`has_scores`, False if it only orders tokens; `cache_key(budget)`, all that scores depend on of a budget, never 0.
"""
