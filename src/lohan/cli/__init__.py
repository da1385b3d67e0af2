"""The command `lohan`: one file per command, gathered in `app`."""

from lohan.cli.app import app, main

__all__ = ["app", "main"]
