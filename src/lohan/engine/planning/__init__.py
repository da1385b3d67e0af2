"""Plans for a run: the model traced as it will run, budgets, drives, predictions, write limits.

Owns the way from a model and a machine to a plan the engine can run. Starts nothing and holds no
thread. Imported by `engine` and, for sizes and limits, by `train`.
"""
