"""Where tensors enter and leave a block: the graph is cut there and its gradients joined again.

Owns the cuts. Runs nothing and moves no bytes. Imported by `drive` only.
"""
