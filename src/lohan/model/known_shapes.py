"""The shapes of every model known by name, for searches of what fits.

Read from the shipped files once per process; nothing is traced.
"""

from functools import lru_cache

from lohan.errors import ConfigError
from lohan.model.names import known_names, shape_of
from lohan.model.shape import ModelShape


@lru_cache(maxsize=8)
def language_models(sequence: int) -> tuple[ModelShape, ...]:
    """Language models that can take sequences of this length."""
    shapes = []
    for name in known_names():
        try:
            shape = shape_of(name, sequence=sequence)
        except ConfigError:
            continue  # It cannot take the sequence, or fixes its own.
        if shape.tokens_per_sample is None:
            shapes.append(shape)
    return tuple(shapes)


@lru_cache(maxsize=1)
def diffusion_models() -> tuple[ModelShape, ...]:
    """Diffusion transformers, whose images fix the sequence."""
    shapes = (shape_of(name) for name in known_names() if name.startswith("dit-"))
    return tuple(shapes)


def models_like(shape: ModelShape, sequence: int) -> tuple[ModelShape, ...]:
    """Known models that do the same kind of work as this one."""
    return language_models(sequence) if shape.tokens_per_sample is None else diffusion_models()
