"""SPEED AND MEMORY: prefill, decode and cache sizes, beside transformers and the roofline."""
