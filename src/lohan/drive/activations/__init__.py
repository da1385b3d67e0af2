"""Operator outputs of a block on their way out and back: dispatch modes and what they may store.

Owns which outputs a mode hands over and puts back; where their bytes go is the business of a store
(`lanes.activation_moves`). Imported by `drive` and its rooms above, `lanes` and `engine`.
"""
