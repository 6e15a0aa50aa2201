"""Offloading: keys and values in host memory and on disk, and their retrieval."""
