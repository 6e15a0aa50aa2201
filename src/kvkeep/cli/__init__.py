"""The command line. Nothing here imports torch or transformers before a command needs them."""

from kvkeep.cli.app import app, main

__all__ = ["app", "main"]
