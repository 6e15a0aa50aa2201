"""Keys and values in host memory and on disk, and the way back."""
