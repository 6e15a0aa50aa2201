"""ANSWERS -> NUMBERS: tasks, how they are scored, and what a run cost."""
