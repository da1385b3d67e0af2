"""From the words of the command line to machine, model and workload.

Owns the reading of sizes, counts and policies, and every refusal of them. Called by the commands
that plan.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from lohan.errors import ConfigError
from lohan.hardware import Machine, machine_from
from lohan.hardware.this_host import kept_machine
from lohan.model.names import canonical_name, shape_of
from lohan.model.shape import ModelShape
from lohan.paper import POLICIES, POLICY_NAMES, policy_named
from lohan.plan.policies import OUR_POLICY, SystemPolicy
from lohan.plan.workload import Workload
from lohan.simulate.answers.answer import Request
from lohan.train.settings.adapter import AdapterSettings
from lohan.units import parse_bytes, parse_rate

DEFAULT_SEQUENCE = 1024
_COUNT = re.compile(r"^(?P<number>\d+(?:[._]?\d+)*(?:[eE]\+?\d{1,2})?)(?P<unit>[kmbtKMBT]?)$")
OTHER_POLICIES = tuple(policy for policy in POLICIES.values() if policy.name != "gpu-only")
"""Those worth offering where one does not fit: who asks here has too little GPU memory for all."""
_SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_BITS = re.compile(r"(?P<number>\d+(?:\.\d+)?) ?(?P<unit>[MG])bit/s", re.IGNORECASE)
_BITS_PER_UNIT = {"m": 1e6, "g": 1e9}


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


def policies_asked(text: str | None) -> tuple[SystemPolicy, ...]:
    """The policies named in a list separated by commas; all of them if none is given.

    Raises:
        ConfigError: for an unknown name, or an empty list.
    """
    if text is None:
        return tuple(POLICIES.values())
    named = [policy_named(word.strip().lower()) for word in text.split(",") if word.strip()]
    if not named:
        raise ConfigError(
            "--policies names none",
            why="there must be something to compare",
            remedy=f"name some of {', '.join(POLICY_NAMES)}, or leave it out",
        )
    return tuple({policy.name: policy for policy in named}.values())


def clips(policy: SystemPolicy, clip: bool | None) -> bool:
    """Whether gradients are clipped: as asked, or as the policy's system does by default.

    Raises:
        ConfigError: if clipping is asked of a system that has none.
    """
    if policy is OUR_POLICY:
        return clip is not False
    if clip:
        raise ConfigError(
            f"--clip was asked of {policy.name}",
            why="the published systems have no exact clipping; a plan with it would describe none "
            "of them",
            remedy=f"leave --clip out, or use --policy {OUR_POLICY.name}",
        )
    return False


def shape_asked(
    model: str, sequence: int | None, adapter: AdapterSettings | None = None
) -> tuple[ModelShape, int]:
    """Return a model's shape and the tokens per sequence; of a hub model its configuration only
    is fetched.

    Raises:
        ConfigError: for an unknown model, or a sequence it cannot take.
        HardwareError: it is on the hub, which cannot be reached.
    """
    if "/" in model and canonical_name(model) is None:
        from lohan.train.weights.model_places import CONFIGURATION, find_place

        model = str(find_place(model, wanted=CONFIGURATION).directory)
    adapted = None if adapter is None else adapter.on
    shape = shape_of(model, sequence=sequence, adapted=adapted)
    if sequence is None and shape.tokens_per_sample is None and canonical_name(model) is None:
        # A model of the user's own may have fewer positions than the default asks for.
        shape = shape_of(model, sequence=DEFAULT_SEQUENCE, adapted=adapted)
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
    adapter: AdapterSettings | None = None,
    should_chunk_loss: bool = False,
) -> Request:
    """Understand a request; `num_directories` is of SSDs of this machine, where none is named, and
    `rated_lives_bytes` what its drives are rated for, where that is said.

    Raises:
        ConfigError: for anything in it that is not valid.
    """
    planner = policy_named(policy.strip().lower())
    clips_gradients = clips(planner, clip)
    box = machine_asked(
        machine, ram=ram, gpu=gpu, ssds=ssds, gpus=gpus, num_directories=num_directories
    )
    if rated_lives_bytes is not None:
        box = box.with_rated_lives(rated_lives_bytes)
    shape, sequence = shape_asked(model, seq, adapter)
    workload = Workload(
        batch=batch,
        sequence=sequence,
        clips_gradients=clips_gradients,
        should_chunk_loss=should_chunk_loss,
    )
    workload.batch_per_gpu(box.num_gpus)
    return Request(
        machine=box, shape=shape, workload=workload, policy=planner, has_own_ram=ram is not None
    )


def as_ranks(request: Request, num_machines: int, network: str | None) -> Request:
    """The same on several such machines, as one of their ranks (a GPU each) sees it.

    Raises:
        ConfigError: the policy knows no ranks, the batch cannot be dealt to them, or it is not
            said how fast the network is.
    """
    box, workload = request.machine, request.workload
    if request.policy is not OUR_POLICY:
        raise ConfigError(
            f"--machines was asked of {request.policy.name}",
            why="the published systems run on one machine",
            remedy=f"leave it out, or use --policy {OUR_POLICY.name}",
        )
    if network is None:
        raise ConfigError(
            f"{num_machines} machines were asked for, and no network",
            why="weights and gradients go through it in every step",
            remedy="say how fast it is: --network 10Gbit/s",
        )
    num_ranks = box.num_gpus * num_machines
    per_rank = workload.batch_per_gpu(num_ranks)
    # The ranks of a machine share its network.
    rank = box.of_rank(box.num_gpus, parse_network(network) / box.num_gpus)
    return replace(
        request,
        machine=replace(rank, name=f"each of {num_ranks} ranks on {num_machines}x {box.name}"),
        workload=replace(workload, batch=per_rank, num_ranks=num_ranks, reduction_groups=num_ranks),
    )


def parse_network(text: str) -> float:
    """Bytes per second of a network such as `10Gbit/s`, or of a rate with bytes.

    Raises:
        ConfigError: it is no rate.
    """
    match = _BITS.fullmatch(text.strip())
    if match is None:
        return parse_rate(text)
    return parse_rate(float(match["number"]) * _BITS_PER_UNIT[match["unit"].lower()] / 8)
