"""Pieces of a page: templates filled in, charts that follow the width of the window."""
