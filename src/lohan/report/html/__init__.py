"""Pieces of a page: markup, charts that follow the width of the window, style and script."""
