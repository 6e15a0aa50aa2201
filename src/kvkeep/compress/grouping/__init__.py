"""Units of tokens that are kept or evicted together: (Observation, scores, free) -> Units.

`free` marks the tokens that compete; those always kept do not count for a unit's score.
"""
