"""Fine-tune models far larger than the GPU, and larger than main memory, on one machine.

Importing this package is cheap: nothing heavy is imported before it is used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from lohan.errors import missing_package

if TYPE_CHECKING:
    from lohan.attaching import attach as attach
    from lohan.engine.engine import Engine as Engine
    from lohan.engine.results import StepResult as StepResult
    from lohan.optimizer.torch_optimizer import AdamW as AdamW
    from lohan.train.tasks.concatenated import CPOTrainer as CPOTrainer
    from lohan.train.tasks.concatenated import ORPOTrainer as ORPOTrainer
    from lohan.train.tasks.preferences import DPOTrainer as DPOTrainer
    from lohan.train.tasks.preferences import KTOTrainer as KTOTrainer
    from lohan.train.tasks.preferences import RewardTrainer as RewardTrainer
    from lohan.train.trainer.trainer import OffloadMixin as OffloadMixin
    from lohan.train.trainer.trainer import SFTTrainer as SFTTrainer
    from lohan.train.trainer.trainer import Trainer as Trainer

__version__ = "0.1.0.dev0"

_HOMES = {
    "AdamW": "lohan.optimizer.torch_optimizer",
    "CPOTrainer": "lohan.train.tasks.concatenated",
    "DPOTrainer": "lohan.train.tasks.preferences",
    "Engine": "lohan.engine.engine",
    "KTOTrainer": "lohan.train.tasks.preferences",
    "ORPOTrainer": "lohan.train.tasks.concatenated",
    "OffloadMixin": "lohan.train.trainer.trainer",
    "RewardTrainer": "lohan.train.tasks.preferences",
    "SFTTrainer": "lohan.train.trainer.trainer",
    "StepResult": "lohan.engine.results",
    "Trainer": "lohan.train.trainer.trainer",
    "attach": "lohan.attaching",
}

__all__ = [
    "AdamW",
    "CPOTrainer",
    "DPOTrainer",
    "Engine",
    "KTOTrainer",
    "ORPOTrainer",
    "OffloadMixin",
    "RewardTrainer",
    "SFTTrainer",
    "StepResult",
    "Trainer",
    "__version__",
    "attach",
]

importlib.import_module("lohan.matrix_tiles")  # before torch computes anything


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is asked for."""
    if name in _HOMES:
        try:
            return getattr(importlib.import_module(_HOMES[name]), name)
        except ModuleNotFoundError as error:
            raise missing_package(error) from error
    if name in ("GRPOTrainer", "RLOOTrainer"):
        raise AttributeError(
            f"there is no lohan.{name}: it trains on answers the model writes during training, and "
            "each token of them is a pass through weights that are on SSD"
        )
    raise AttributeError(f"module 'lohan' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
