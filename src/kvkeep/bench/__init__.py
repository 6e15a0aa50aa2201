"""Speed and memory, beside what a user has today."""
