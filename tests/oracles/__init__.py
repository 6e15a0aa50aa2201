"""Independent plain-loop float64 oracles of the methods in METHODS.md. They know nothing of the library's code."""
