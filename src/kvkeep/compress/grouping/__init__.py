"""Which tokens are kept or dropped together: (Observation, scores, free) -> Units.

`free` marks the tokens that compete; those that stay in any case are not part of a unit's worth.
"""
