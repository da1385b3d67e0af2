"""What people ask about a plan: what it costs, what if, which batch, what would fit instead.

Owns the questions and their answers as numbers, simulated. Imported by `train`, `report` and the
commands. Never prints, and never decides for a run: policies do.
"""
