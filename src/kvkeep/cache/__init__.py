"""`kvkeep.Cache`: all that happens in one attention call."""
