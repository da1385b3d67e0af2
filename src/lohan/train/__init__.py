"""Fine-tuning: models in and out of Hugging Face's layout, and trainers on top of the engine.

Owns `fine_tune`, a whole run; the rest is in its rooms. Imported by the commands and the package
itself. Never plans or moves tensors: the engine does.
"""
