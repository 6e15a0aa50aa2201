"""What to keep, turned into memory: ragged storage that really shrinks, and files of it."""
