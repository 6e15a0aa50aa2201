"""Retrieval: nothing is dropped; what does not fit is put away in units and fetched when queries ask for it."""
