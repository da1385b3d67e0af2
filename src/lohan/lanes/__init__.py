"""The lane threads: tasks of a schedule carried out, and the memory and moves behind them.

Owns the executor and the actions of tasks (weights, gradients, activations, updates). Decides
nothing: plan and schedule have. Never runs the user's model. Imported by `engine` only.
"""
