"""Training on preferences and rewards: TRL's trainers for them, with the engine underneath.

Owns what these need besides the mixin: a reference, forwards without gradients, pairs. Imported by
`fine_tune` and as `lohan.DPOTrainer` and its like. Never reads settings files.
"""
