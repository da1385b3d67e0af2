"""Parameters whose values come and go: views into flat buffers, and what stands in meanwhile.

Owns the binding of parameters. Moves no bytes: `lanes` does. Imported by `drive`, `lanes`, `engine`
and, for the question whether weights are offloaded, by `train`.
"""
