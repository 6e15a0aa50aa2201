"""How a budget is shared: first among layers, then among the key heads of one layer."""
