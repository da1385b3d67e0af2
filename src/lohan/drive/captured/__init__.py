"""Blocks as graphs: recorded once, cut into a forward and a backward, run without Python of theirs.

Owns the recording (`record`), what is stored and what is run again (`cut`), the functions made from
that (`functions`), and who may be captured at all (`captures`). Imported by `drive` only.
"""
