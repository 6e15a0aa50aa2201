"""QUALITY: tasks, metrics, and the grid of methods and budgets they are scored with."""
