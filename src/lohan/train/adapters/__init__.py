"""Adapters (PEFT) on a frozen base: which are taken, how they are made, written and merged.

Owns all that knows PEFT. Knows no trainer and no run; values stream through. Imported by the rooms
of `train` above it, and by `lohan plan` for shapes.
"""
