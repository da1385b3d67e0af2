"""Models in and out: sources read, checkpoints and exports written, streamed tensor by tensor.

Owns file formats of weights and the lists that prove them whole. Knows no trainer. Imported by the
other rooms of `train`, and by `lohan check` and `lohan export`.
"""
