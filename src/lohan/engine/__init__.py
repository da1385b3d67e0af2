"""The engine: from options to an attached model, one optimizer step after another, to a seal.

Owns `attach`, `step`, `evaluate`, `seal` and `close` of a run. Knows no trainer and no data set.
Imported by `lohan.attach`, `train` and `verify`.
"""
