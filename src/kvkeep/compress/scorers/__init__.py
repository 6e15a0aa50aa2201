"""How much each token is worth: (Observation, budget) -> [kv_heads, n] float32, larger is better."""
