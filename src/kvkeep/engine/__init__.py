"""Time: one request from its first token to its last."""
