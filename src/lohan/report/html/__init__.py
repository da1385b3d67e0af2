"""Pieces of a page: markup, charts that follow the width of the window, style and script.

Owns what is written into a page. Imported by `report`. Never knows runs.
"""
