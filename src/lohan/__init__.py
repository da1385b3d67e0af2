"""Fine-tune models far larger than the GPU, and larger than main memory, on one machine.

Importing this package is cheap: nothing heavy is imported before it is used.
"""

__version__ = "0.1.0.dev0"

__all__ = ["__version__"]
