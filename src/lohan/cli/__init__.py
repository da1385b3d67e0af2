"""The command `lohan`: one file per command, gathered in `app`.

Owns options and what is printed. Imported by nobody. Never computes an answer: rooms below do.
"""

from lohan.cli.app import app, main

__all__ = ["app", "main"]
