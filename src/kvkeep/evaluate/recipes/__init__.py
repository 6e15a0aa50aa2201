"""Every table of the five papers: what was run, and the numbers it printed."""
