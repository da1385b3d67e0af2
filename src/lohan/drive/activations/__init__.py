"""Activations of a block between its forward and its backward: keys, stores, choices.

Owns names; where bytes go is the business of a store (`lanes.activation_moves`). Imported by
`drive` and its rooms above, `lanes` and `engine`.
"""
