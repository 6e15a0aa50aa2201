"""Budgets: of layers within a model (layers.py), of key heads within a layer (heads.py)."""
