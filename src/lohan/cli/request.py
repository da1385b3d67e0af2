"""From the words of the command line to machine, model and workload.

Owns the reading of sizes, counts and policies, and every refusal of them. Called by the commands
that plan.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lohan.errors import ConfigError, nearest_names
from lohan.hardware import Machine, machine_from
from lohan.hardware.this_host import kept_machine
from lohan.model.names import canonical_name, shape_of
from lohan.model.shape import ModelShape
from lohan.plan.limits import Question
from lohan.plan.policies import POLICY_NAMES
from lohan.plan.policies.ours import OURS
from lohan.plan.workload import Workload
from lohan.units import parse_bytes

DEFAULT_SEQUENCE = 1024
_COUNT = re.compile(r"^(?P<number>\d+(?:[._]?\d+)*(?:[eE]\+?\d{1,2})?)(?P<unit>[kmbtKMBT]?)$")
_SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a command was asked for, understood."""

    machine: Machine
    shape: ModelShape
    workload: Workload
    policy: str
    has_own_ram: bool
    """The RAM size was given on the command line."""

    @property
    def question(self) -> Question:
        """The same as a question to the planner."""
        return Question(
            policy=self.policy, machine=self.machine, shape=self.shape, workload=self.workload
        )


def parse_size(text: str, option: str) -> int:
    """Return a size given on the command line, which must carry its unit.

    Raises:
        ConfigError: if it is no size, has no unit, or is nothing.
    """
    if text.strip().replace(".", "", 1).isdigit():
        raise ConfigError(
            f"{option} {text.strip()} has no unit",
            why=f"it would mean {text.strip()} bytes",
            remedy=f"write {option} {text.strip()}GiB (or MiB, GB ...)",
        )
    size_bytes = parse_bytes(text)
    if size_bytes < 1:
        raise ConfigError(
            f"{option} {text} is nothing",
            why="there must be some memory to plan with",
            remedy=f"give a size above zero, such as {option} 64GiB",
        )
    return size_bytes


def parse_tokens(text: str) -> int:
    """Return a number of tokens such as `50M`, `1.2B` or `3_000_000`.

    Raises:
        ConfigError: if it is no such number, or below 1.
    """
    match = _COUNT.match(text.strip())
    number = (
        float(match["number"].replace("_", "")) * _SCALES[match["unit"].lower()] if match else 0
    )
    if not 1 <= number <= 1e18:
        raise ConfigError(
            f"--tokens {text!r} is not a number of tokens",
            why="a number of 1 or more with no unit or one of K, M, B, T was expected",
            remedy="write --tokens 50M or --tokens 1.2B",
        )
    return round(number)


def machine_asked(
    machine: str | None,
    *,
    ram: str | None,
    gpu: str | None,
    ssds: int | None,
    gpus: int | None,
    num_directories: int | None = None,
) -> Machine:
    """Return the machine with what the options replace; this one, as measured, if none is named.

    Raises:
        ConfigError: for an unknown machine, a damaged file, a size or count that cannot be, or
            where this machine is meant and was not measured.
    """
    found = kept_machine(num_directories).machine if machine is None else machine_from(machine)
    if ram is not None:
        found = found.with_ram(parse_size(ram, "--ram"))
    if gpu is not None:
        found = found.with_gpu_memory(parse_size(gpu, "--gpu"))
    if ssds is not None:
        found = found.with_ssds(ssds)
    if gpus is not None:
        found = found.with_gpus(gpus)
    return found


def check_policy(policy: str) -> str:
    """Return a policy's name.

    Raises:
        ConfigError: if there is none of that name.
    """
    name = policy.strip().lower()
    if name not in POLICY_NAMES:
        raise ConfigError(
            f"there is no policy {policy!r}",
            why=f"the policies are {', '.join(POLICY_NAMES)}",
            remedy=nearest_names(name, POLICY_NAMES),
        )
    return name


def clips(policy: str, clip: bool | None) -> bool:
    """Whether gradients are clipped: as asked, or as the policy's system does by default.

    Raises:
        ConfigError: if clipping is asked of a system that has none.
    """
    if policy == OURS.name:
        return clip is not False
    if clip:
        raise ConfigError(
            f"--clip was asked of {policy}",
            why="the published systems have no exact clipping; a plan with it would describe none "
            "of them",
            remedy=f"leave --clip out, or use --policy {OURS.name}",
        )
    return False


def shape_asked(model: str, sequence: int | None) -> tuple[ModelShape, int]:
    """Return a model's shape and the tokens per sequence; of a hub model its configuration only
    is fetched.

    Raises:
        ConfigError: for an unknown model, or a sequence it cannot take.
        HardwareError: it is on the hub, which cannot be reached.
    """
    if "/" in model and canonical_name(model) is None:
        from lohan.train.weights.model_places import CONFIGURATION, find_place

        model = str(find_place(model, wanted=CONFIGURATION).directory)
    shape = shape_of(model, sequence=sequence)
    if sequence is None and shape.tokens_per_sample is None and canonical_name(model) is None:
        # A model of the user's own may have fewer positions than the default asks for.
        shape = shape_of(model, sequence=DEFAULT_SEQUENCE)
    return shape, sequence or shape.tokens_per_sample or DEFAULT_SEQUENCE


def request_of(
    *,
    model: str,
    machine: str | None,
    batch: int,
    seq: int | None,
    ram: str | None,
    gpu: str | None,
    ssds: int | None,
    gpus: int | None,
    policy: str,
    clip: bool | None,
    num_directories: int | None = None,
    rated_lives_bytes: Sequence[int] | None = None,
) -> Request:
    """Understand a request; `num_directories` is of SSDs of this machine, where none is named, and
    `rated_lives_bytes` what its drives are rated for, where that is said.

    Raises:
        ConfigError: for anything in it that cannot be meant.
    """
    name = check_policy(policy)
    clips_gradients = clips(name, clip)
    box = machine_asked(
        machine, ram=ram, gpu=gpu, ssds=ssds, gpus=gpus, num_directories=num_directories
    )
    if rated_lives_bytes is not None:
        box = box.with_rated_lives(rated_lives_bytes)
    shape, sequence = shape_asked(model, seq)
    workload = Workload(batch=batch, sequence=sequence, clips_gradients=clips_gradients)
    workload.batch_per_gpu(box.num_gpus)
    return Request(
        machine=box, shape=shape, workload=workload, policy=name, has_own_ram=ram is not None
    )
