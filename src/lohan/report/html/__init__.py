"""Pieces of a page: templates filled in, charts that follow the width of the window.

Owns what is written into a page. Imported by `report`. Never knows runs.
"""
