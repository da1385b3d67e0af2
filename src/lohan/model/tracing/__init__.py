"""Running a module on fake tensors: its blocks, its operators, and what each keeps.

Owns the run itself and that it leaves the module as it found it. Imported by the rest of `model`,
which makes shapes of it, by `drive` and by `engine.planning`. Never computes a value and never
decides.
"""
