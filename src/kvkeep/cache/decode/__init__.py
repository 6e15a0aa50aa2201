"""Decode steps: which kinds there are (policy.py), the rows that each runs over, and how a step runs (runner.py)."""
