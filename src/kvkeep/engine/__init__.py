"""`kvkeep.Engine`: requests over time, from a prompt's first token to an answer's last."""
