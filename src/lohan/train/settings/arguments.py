"""From a checked configuration to TRL's arguments, and what of them cannot be honoured.

Owns what is refused with its reason (`refuse_unsupported`), what is not valid (`refuse_impossible`;
transformers finds such values late, in the middle of its loop, or takes them), and what has no
effect because planner or seals decide it (`switch_off`). Trainers and commands ask here.
"""

import sys
from typing import Any

from lohan.errors import ConfigError
from lohan.train.settings.config import TrainConfig

_ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf")
_HUB_STRATEGIES = ("end", "every_save")
_ENGINE_MOVES = "the engine moves weights itself: something else must not"
REFUSED_ARGUMENTS = {
    "fsdp": _ENGINE_MOVES,
    "deepspeed": _ENGINE_MOVES,
    "parallelism_config": "one process runs a step on one machine",
    "torch_compile": "a compiled graph holds on to weights that are not there all the time",
    "use_liger_kernel": "it replaces the forward of layers the engine drives",
    "optim_args": "they are of another optimizer than AdamW",
    "ignore_data_skip": "a resumed run would see other rows than one that was never stopped",
}
_IN_COMPUTE_FORMAT = "weights are in their compute format already"
_SIGNALS = "enable_jit_checkpoint"
HAVE_NO_EFFECT = {
    "auto_find_batch_size": "the plan says before the first step what fits, and nothing else runs",
    "bf16_full_eval": _IN_COMPUTE_FORMAT,
    "fp16_full_eval": _IN_COMPUTE_FORMAT,
    _SIGNALS: "SIGTERM seals and stops a run always",
    "save_only_model": "a seal holds the states, and no model: offload.save_model_steps keeps some",
}
"""Switches that a script may have on, each with what happens instead."""
# By argument: the least value, and whether that value itself is allowed.
_LEAST: dict[str, tuple[int, bool]] = {
    "per_device_train_batch_size": (1, True),
    "per_device_eval_batch_size": (1, True),
    "gradient_accumulation_steps": (1, True),
    "max_length": (1, True),
    "learning_rate": (0, True),
    "weight_decay": (0, True),
    "max_grad_norm": (0, True),
    "adam_epsilon": (0, True),
    "save_steps": (0, False),
    "eval_steps": (0, False),
    "logging_steps": (0, False),
    "eval_accumulation_steps": (1, True),
    "neftune_noise_alpha": (0, True),
    "dataloader_num_workers": (0, True),
}
_STEPS_OF_A_TRIAL = 1000


def make_arguments(config: TrainConfig) -> Any:
    """TRL's arguments for a run.

    Raises:
        ConfigError: transformers or TRL refuse a value.
    """
    from lohan.device import torch_device_named

    arguments = dict(config.arguments)
    # Before transformers looks at them: it would ask for packages that would not help.
    for name, why in REFUSED_ARGUMENTS.items():
        if arguments.get(name):
            raise _refusal(name, why)
    arguments["use_cpu"] = torch_device_named(config.offload.device).type == "cpu"
    try:
        return config.task.arguments_class()(output_dir=config.out, **arguments)
    except (ValueError, TypeError, ImportError) as error:
        raise ConfigError(
            "the training arguments do not go together",
            why=" ".join(str(error).split()).rstrip("."),
            remedy="correct the named argument; docs/configuration.md lists them",
        ) from error


def refuse_unsupported(args: Any) -> None:
    """Refuse arguments that cannot work under the engine, each with its reason, or at all.

    Raises:
        ConfigError: one of them is set.
    """
    refuse_impossible(args)
    optim = str(getattr(args.optim, "value", args.optim))
    if optim not in _ADAMW:
        raise ConfigError(
            f"optim={optim} is not supported",
            why="AdamW with fp32 states is the optimizer the engine runs",
            remedy="leave it out",
        )
    if args.world_size > 1 and not args.average_tokens_across_devices:
        raise ConfigError(
            f"average_tokens_across_devices is off, and {args.world_size} processes were started",
            why="the weight of a token would depend on which rank has it, and so would results",
            remedy="leave it out",
        )
    for name, why in REFUSED_ARGUMENTS.items():
        if getattr(args, name, None):
            raise _refusal(name, why)
    strategy = str(getattr(args.hub_strategy, "value", args.hub_strategy))
    if args.push_to_hub and strategy not in _HUB_STRATEGIES:
        raise ConfigError(
            f"hub_strategy={strategy} is not supported",
            why="a checkpoint holds the states and settings of the run; only the model is sent",
            remedy="set hub_strategy=end, or send an archive yourself",
        )


def refuse_impossible(args: Any) -> None:
    """Refuse numbers that are not valid, each with the range it must be in.

    Raises:
        ConfigError: one of them is out of its range, or nothing would be trained.
    """
    for name, (least, is_allowed) in _LEAST.items():
        value: Any = getattr(args, name, None)
        if value is None or value > least or (is_allowed and value == least):
            continue
        bound = f"{least} or more" if is_allowed else f"above {least}"
        raise ConfigError(
            f"{name} is {value}", why=f"it must be {bound}", remedy=f"set {name} to {bound}"
        )
    for name in ("adam_beta1", "adam_beta2", "label_smoothing_factor"):
        share: Any = getattr(args, name, 0.0)
        if not 0 <= share < 1:
            raise ConfigError(
                f"{name} is {share}",
                why="it must be 0 or more and below 1",
                remedy=f"set {name} to 0 or more and below 1",
            )
    if args.max_steps == 0 or (args.max_steps < 0 and args.num_train_epochs <= 0):
        raise ConfigError(
            f"num_train_epochs is {args.num_train_epochs} and max_steps is {args.max_steps}",
            why="nothing would be trained",
            remedy="set max_steps to a number above 0, or leave it out and set num_train_epochs",
        )
    _refuse_schedule(args)


def _refuse_schedule(args: Any) -> None:
    """Make the schedule once for an optimizer nobody uses."""
    import torch
    from transformers import get_scheduler

    num_steps = args.max_steps if args.max_steps > 0 else _STEPS_OF_A_TRIAL
    try:
        get_scheduler(
            args.lr_scheduler_type,
            optimizer=torch.optim.SGD([torch.zeros(1)], lr=max(args.learning_rate, 1e-9)),
            num_warmup_steps=args.get_warmup_steps(num_steps),
            num_training_steps=num_steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        )
    except (TypeError, ValueError) as error:
        name = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
        raise ConfigError(
            f"the schedule {name} cannot be made with lr_scheduler_kwargs="
            f"{args.lr_scheduler_kwargs}",
            why=" ".join(str(error).split()).rstrip("."),
            remedy="correct lr_scheduler_type or lr_scheduler_kwargs",
        ) from error


def refuse_endless_stream(config: TrainConfig, args: Any) -> None:
    """Refuse rows that are read as they are needed where somebody has to know all of them.

    Raises:
        ConfigError: the task compares or counts rows beforehand, or no length is given.
    """
    if not config.is_streamed:
        return
    if config.task.rows not in ("sft", "text"):
        raise ConfigError(
            f"streaming is on and task is {config.task.name}",
            why="its rows are looked at before the first step",
            remedy="leave streaming out",
        )
    if args.max_steps <= 0:
        raise ConfigError(
            "streaming is on and max_steps is not set",
            why="how many rows a stream has is not known, and schedules need a length",
            remedy="set max_steps",
        )


def refuse_chunked_loss(trainer: Any) -> None:
    """Refuse to compute a loss in chunks that is not the model's own.

    Raises:
        ConfigError: the trainer computes it from logits, or TRL does.
    """
    for kind in type(trainer).__mro__:
        if kind.__module__.startswith("trl.") and "compute_loss" in vars(kind):
            why = f"TRL computes the loss of {kind.__name__} itself, from tiles of its own"
            break
    else:
        asked = trainer.compute_loss_func or trainer.args.label_smoothing_factor
        why = "compute_loss_func and label smoothing read all logits" if asked else ""
    if why:
        raise ConfigError(
            "offload.chunked_loss is on for a loss that is not the model's own",
            why=why,
            remedy="leave it out, or train with lohan.Trainer and the loss of the model",
        )


def refuse_generating(kind: type) -> None:
    """Refuse a trainer of TRL that trains on what the model writes.

    Raises:
        ConfigError: it is one.
    """
    for one in kind.__mro__:
        module = sys.modules.get(one.__module__)
        is_trl = one.__module__.startswith("trl.")
        generates = hasattr(module, "unwrap_model_for_generation") or "Async" in one.__name__
        if is_trl and generates:
            raise ConfigError(
                f"{one.__name__} is not supported",
                why="it trains on answers the model writes during training, and each token of "
                "them is a pass through weights that are on SSD",
                remedy="write the answers beforehand and train on them as preferences "
                "(lohan.DPOTrainer, lohan.KTOTrainer), or use TRL on a machine whose GPUs hold "
                "the model",
            )


def refuse_broken_window(trainer: Any, num_batches: int) -> None:
    """Refuse the rest of a stream that is no whole step: it would be one that nobody counts.

    Raises:
        ConfigError: there are fewer micro-batches than a step has, and no step is due.
    """
    from transformers.trainer_utils import has_length

    wanted = trainer.args.gradient_accumulation_steps
    if not trainer.is_in_train or num_batches == wanted:
        return
    if not has_length(trainer.callback_handler.train_dataloader):
        raise ConfigError(
            f"the stream of rows ended with {num_batches} of the {wanted} micro-batches of a step",
            why="transformers adds their gradients to those of the next epoch's first step, and "
            "the engine keeps none between steps",
            remedy="set gradient_accumulation_steps=1, or max_steps to the whole steps of the "
            f"stream, or give a stream of a multiple of {wanted} batches",
        )


def _refusal(name: str, why: str) -> ConfigError:
    return ConfigError(f"{name} is not supported", why=why, remedy="leave it out")


def switch_off(args: Any) -> list[str]:
    """Switch off what does nothing here; one sentence for each argument that was set."""
    notes = []
    for name, instead in HAVE_NO_EFFECT.items():
        if getattr(args, name):
            notes.append(f"{name}: {instead}")
            # That of signals brings a callback, which finds them handled while a run trains.
            setattr(args, name, name == _SIGNALS)
    if args.gradient_checkpointing_kwargs:
        notes.append("gradient_checkpointing_kwargs: the planner decides what is recomputed")
    args.gradient_checkpointing, args.gradient_checkpointing_kwargs = False, None
    if getattr(args, "activation_offloading", False):
        notes.append("activation_offloading: the planner decides which activations are swapped")
        args.activation_offloading = False
    if args.torch_empty_cache_steps is not None:
        notes.append("torch_empty_cache_steps: the engine owns the memory of the GPU")
    if args.push_to_hub and str(getattr(args.hub_strategy, "value", "")) == "every_save":
        notes.append("hub_strategy=every_save: a seal writes no model; it is sent at the end")
    return notes
