"""Published figures next to simulated ones: the same row, the error, and the spread per figure.

Owns the meaning of each metric in terms of a simulated step. A row whose setting the source does
not state, or whose metric has no counterpart, is reported as not simulated with the reason;
nothing is fitted here.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache

from lohan.errors import ConfigError, DoesNotFit
from lohan.hardware.machine import Machine
from lohan.hardware.presets import machine_named
from lohan.model.names import canonical_name, shape_of
from lohan.model.shape import ModelShape
from lohan.paper.policies import policy_named
from lohan.paper.rows import GPT_SIZES, PublishedRow, whole_number
from lohan.plan.plan import Plan
from lohan.plan.system import UpdateTiming
from lohan.plan.workload import Workload
from lohan.simulate.result import SimulatedStep
from lohan.simulate.simulator import simulate_plan
from lohan.units import GIB
from lohan.vocabulary import Lane

PAPER_SEQUENCE = 1024
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Batches per GPU that "best" and "largest" choose from: the published sweeps double."""

FIGURE_BATCHES = {("Fig 10a", "lohan"): 24, ("Fig 10a", "zero-infinity"): 8}
"""Batches that a figure does not state, inferred from it; docs/reproduction.md says how."""

SYSTEM_NAMES = {"ratel": "lohan", "ratel-dp": "lohan", "fast-dit": "gpu-only"}
"""Other names the sources use for a system."""
DIT_SIZES = ("0.67B", "0.9B", "0.90B", "1.4B", "10B", "20B", "40B")
"""The paper's diffusion models; no GPT has one of these sizes."""

THROUGHPUT_METRICS = ("tokens_per_second", "tflops", "images_per_second", "samples_per_second")
_UNSTATED_BATCH = 8
"""Batch per GPU of a measurement that does not state it: the one all systems were shown with."""
_CAPACITY_BATCH = 32
"""Batch of a capacity row that does not state it: the one of its figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReproducedRow:
    """A published row and what the simulator says."""

    row: PublishedRow
    published: float | str | None
    simulated: float | str | None
    relative_error: float | None = None
    reason: str = ""
    """Why it was not simulated."""

    @property
    def is_right(self) -> bool | None:
        """Whether a capacity row agrees; None for rows with a number."""
        if self.row.metric not in _WHAT_FITS or self.reason:
            return None
        return str(self.published).casefold() == str(self.simulated).casefold()

    def to_fields(self) -> dict[str, object]:
        """Every column, then published, simulated and relative_error."""
        fields = asdict(self)
        return {**fields.pop("row"), **fields}


def machine_of(row: PublishedRow) -> Machine:
    """The paper's server as the row describes it."""
    gpu = row.gpu.casefold().removeprefix("rtx").strip(" -")
    machine = machine_named(f"paper-{gpu}").with_gpus(row.num_gpus)
    if row.ram_gb is not None:
        machine = machine.with_ram(row.ram_gb * GIB)
    if row.num_ssds is not None:
        machine = machine.with_ssds(row.num_ssds)
    return machine


@lru_cache(maxsize=64)
def _shape(name: str) -> ModelShape:
    if canonical_name(name) is not None:
        return shape_of(name)
    size = name.casefold().removeprefix("gpt").removeprefix("dit").strip(" -")
    if name.casefold().startswith("dit") or size.upper() in DIT_SIZES:
        return shape_of(f"dit-{'0.90b' if size == '0.9b' else size}")
    return shape_of(f"gpt-{size}")


def _plan(row: PublishedRow, model: str, batch: int) -> tuple[Plan, Machine]:
    machine, shape = machine_of(row), _shape(model)
    sequence = shape.tokens_per_sample or PAPER_SEQUENCE
    name = row.system.casefold()
    system = SYSTEM_NAMES.get(name, name)
    workload = Workload(batch=batch, sequence=sequence)
    return policy_named(system).plan(machine, shape, workload), machine


def _fits(row: PublishedRow, model: str, batch: int) -> bool:
    return _plan(row, model, batch)[0].ledger.fits


def _fitting_batches(row: PublishedRow) -> list[int]:
    batches = [batch * row.num_gpus for batch in BATCHES]
    return [batch for batch in batches if _fits(row, row.model, batch)]


@lru_cache(maxsize=4096)
def _step(row: PublishedRow, model: str, batch: int) -> SimulatedStep:
    plan, machine = _plan(row, model, batch)
    plan.ledger.require_fit(f"{row.system} with {model} and a batch of {batch}")
    return simulate_plan(plan, machine)


def _chosen_step(row: PublishedRow) -> SimulatedStep:
    words = row.batch.casefold()
    if words == "largest" and (row.figure, row.system) in FIGURE_BATCHES:
        return _step(row, row.model, FIGURE_BATCHES[row.figure, row.system])
    if words in ("best", "largest"):
        fitting = _fitting_batches(row)
        if not fitting:
            raise DoesNotFit(
                f"{row.model} runs with no batch",
                why="not even one sequence per GPU fits",
                remedy="compare a smaller model",
            )
        if words == "largest":
            return _step(row, row.model, fitting[-1])
        steps = [_step(row, row.model, batch) for batch in fitting]
        return max(steps, key=lambda step: step.tokens_per_second)
    if words in ("-", ""):
        return _step(row, row.model, _UNSTATED_BATCH * row.num_gpus)
    return _step(row, row.model, _whole_batch(words))


def _backward_seconds(row: PublishedRow, step: SimulatedStep) -> float:
    plan, _machine = _plan(row, row.model, row.num_gpus)
    if plan.system.update_timing is UpdateTiming.AFTER_BACKWARD:
        return step.backward_seconds
    # Updates are part of the backward pass: there is no stage of their own.
    return step.step_seconds - step.forward_seconds


_NUMBERS: Mapping[str, Callable[[PublishedRow, SimulatedStep], float]] = {
    "tokens_per_second": lambda _, step: step.tokens_per_second,
    "images_per_second": lambda _, step: step.sequences_per_second,
    "samples_per_second": lambda _, step: step.sequences_per_second,
    "tflops": lambda _, step: step.paper_tflops,
    "iteration_seconds": lambda _, step: step.step_seconds,
    "step_seconds": lambda _, step: step.step_seconds,
    "forward_seconds": lambda _, step: step.forward_seconds,
    "backward_seconds": _backward_seconds,
    "optimizer_seconds": lambda _, step: step.optimizer_seconds,
    "optimizer_share_percent": lambda _, step: 100 * step.optimizer_seconds / step.step_seconds,
    "gpu_busy_percent": lambda _, step: 100 * step.busy_share(Lane.GPU),
    "tokens_per_second_per_kdollar": lambda _, step: (
        step.tokens_per_second / (step.price_dollars / 1000)
    ),
}


_UNSTATED = {
    "iteration_seconds_at_swapped_gib": "the setting of this sweep is not stated, and it is "
    "slower than that of the throughput figures",
    "predicted_optimum_gib_and_seconds": "the setting of this sweep is not stated",
}


def reproduce_row(row: PublishedRow) -> ReproducedRow:
    """Simulate what a row published."""
    try:
        if row.metric in _WHAT_FITS:
            fitting = _WHAT_FITS[row.metric](row)
            return ReproducedRow(row=row, published=row.value, simulated=fitting)
        if row.metric not in _NUMBERS:
            reason = _UNSTATED.get(row.metric, f"the metric {row.metric!r} is not known")
            return _skipped(row, reason)
        published = _number(row.value)
        simulated = _NUMBERS[row.metric](row, _chosen_step(row))
    except DoesNotFit as error:
        return _skipped(row, error.what, simulated="does not fit")
    except ConfigError as error:
        return _skipped(row, error.what)
    return ReproducedRow(
        row=row,
        published=published,
        simulated=simulated,
        relative_error=simulated / published - 1,
    )


def _number(text: str) -> float:
    """The value of a row whose metric is a number.

    Raises:
        ConfigError: if it is none that an error can be relative to.
    """
    try:
        number = float(text.replace(",", ""))
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise ConfigError(
            f"the value {text!r} is not a number above zero",
            why="an error is relative to it",
            remedy="correct the row",
        )
    return number


def _whole_batch(word: str) -> int:
    """The batch a row states.

    Raises:
        ConfigError: if it is no whole number.
    """
    batch = whole_number(word)
    if batch is None:
        raise ConfigError(
            f"the batch {word!r} is not known",
            why='a whole number, "best", "largest", "any" or "-" was expected',
            remedy="correct the row",
        )
    return batch


def _skipped(row: PublishedRow, reason: str, simulated: str | None = None) -> ReproducedRow:
    return ReproducedRow(row=row, published=row.value, simulated=simulated, reason=reason)


def _feasible(row: PublishedRow) -> str:
    models = [name.strip() for name in row.model.split("/")]
    if row.model.endswith("and up"):
        smallest = _shape(row.model.removesuffix("and up").strip()).num_parameters
        models = [size for size in GPT_SIZES if _shape(size).num_parameters >= smallest]
    batches = [word.strip().casefold() for word in row.batch.split("/")]
    if len(batches) == 1:
        batches *= len(models)
    if len(batches) != len(models):
        raise ConfigError(
            f"{len(models)} models and {len(batches)} batches",
            why="it is not said which batch belongs to which model",
            remedy="give one batch, or one per model",
        )

    def batch_of(word: str) -> int:
        if word in ("any", "best", "largest"):
            return row.num_gpus
        return _CAPACITY_BATCH if word in ("-", "") else _whole_batch(word)

    fits = [_fits(row, model, batch_of(word)) for model, word in zip(models, batches, strict=True)]
    return "yes" if any(fits) else "no"


def _max_model(row: PublishedRow) -> str:
    is_stated = row.batch.casefold() not in ("-", "any", "")
    batch = _whole_batch(row.batch) if is_stated else row.num_gpus
    if row.value in DIT_SIZES:
        fitting = [size for size in DIT_SIZES if _fits(row, size, batch)]
        return fitting[-1] if fitting else "none"
    sizes = [size for size in GPT_SIZES if size not in ("65B", "70B")]
    # One model, two names: answer with the one the row uses; Fig 8 says 65B, Fig 6 says 70B.
    says_65b = row.value == "65B" or (row.value != "70B" and row.source.startswith("Fig 8"))
    sizes.insert(4, "65B" if says_65b else "70B")
    fitting = [size for size in sizes if _fits(row, size, batch)]
    return fitting[-1] if fitting else "none"


def _max_batch(row: PublishedRow) -> str:
    fitting = _fitting_batches(row)
    return str(fitting[-1]) if fitting else "none"


_WHAT_FITS = {"feasible": _feasible, "max_model": _max_model, "max_batch": _max_batch}
"""Metrics that are no number: what is answered is what fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Errors of a group of rows."""

    name: str
    num_rows: int
    median: float
    percentile_90: float
    largest: float


def spread_of(name: str, rows: Iterable[ReproducedRow]) -> Spread | None:
    """Median, 90th percentile and largest absolute error of the rows that have one."""
    errors = sorted(abs(row.relative_error) for row in rows if row.relative_error is not None)
    if not errors:
        return None
    rank = min(len(errors) - 1, -(-9 * len(errors) // 10) - 1)
    return Spread(
        name=name,
        num_rows=len(errors),
        median=statistics.median(errors),
        percentile_90=errors[rank],
        largest=errors[-1],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction:
    """Every row, and the spreads."""

    rows: tuple[ReproducedRow, ...]

    @property
    def throughput(self) -> list[ReproducedRow]:
        """Rows about speed: tokens, images or FLOPs per second."""
        return [row for row in self.rows if row.row.metric in THROUGHPUT_METRICS]

    @property
    def capacity(self) -> list[ReproducedRow]:
        """Rows about what fits that were simulated."""
        return [row for row in self.rows if row.is_right is not None]

    @property
    def skipped(self) -> list[ReproducedRow]:
        """Rows that were not simulated."""
        return [row for row in self.rows if row.reason]

    def overall(self) -> list[Spread]:
        """The spreads over all figures."""
        throughput = self.throughput
        groups = {
            "throughput, all systems": throughput,
            "throughput, lohan on one GPU": [
                row for row in throughput if row.row.system == "lohan" and row.row.num_gpus == 1
            ],
            "throughput, other systems": [row for row in throughput if row.row.system != "lohan"],
            "throughput, several GPUs": [row for row in throughput if row.row.num_gpus > 1],
            "stages and shares": [
                row for row in self.rows if row.row.metric not in THROUGHPUT_METRICS
            ],
        }
        return _spreads(groups.items())

    def per_figure(self) -> list[Spread]:
        """The spreads figure by figure, throughput and stage times alike."""
        figures: dict[str, list[ReproducedRow]] = {}
        for row in self.rows:
            figures.setdefault(row.row.figure, []).append(row)
        return _spreads(sorted(figures.items()))

    def to_fields(self) -> dict[str, object]:
        """Every row with all its columns, and the summary."""
        right = sum(bool(row.is_right) for row in self.capacity)
        return {
            "simulated": True,
            "rows": [row.to_fields() for row in self.rows],
            "summary": {
                "overall": [asdict(spread) for spread in self.overall()],
                "figures": [asdict(spread) for spread in self.per_figure()],
                "capacity": {
                    "num_rows": len(self.capacity),
                    "num_right": right,
                    "share_right": right / len(self.capacity) if self.capacity else None,
                },
                "num_rows": len(self.rows),
                "num_not_simulated": len(self.skipped),
            },
        }


def _spreads(groups: Iterable[tuple[str, Sequence[ReproducedRow]]]) -> list[Spread]:
    found = (spread_of(name, rows) for name, rows in groups)
    return [spread for spread in found if spread is not None]


def reproduction_of(rows: Iterable[PublishedRow]) -> Reproduction:
    """Simulate every row."""
    return Reproduction(rows=tuple(reproduce_row(row) for row in rows))
