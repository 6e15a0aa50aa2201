"""The only folder that touches transformers: loading models, and passing queries, keys and values to caches."""
