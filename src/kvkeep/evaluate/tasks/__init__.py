"""Where samples come from: one file per benchmark."""
