"""Retrieval: nothing is evicted; tokens beyond the budget are offloaded in units and retrieved by queries."""
