"""The only folder that touches transformers: loading, and the hand-over of queries, keys and values."""
