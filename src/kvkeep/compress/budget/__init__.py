"""Budgets: of layers within a model (layers.py), of KV heads within a layer (heads.py)."""
