"""Captured blocks: which there are, and the functions that run them.

Owns what a capture depends on (`call_key`, `settings_of`), the graphs that blocks share
(`Captures`), and for each block whether it may be run so: only after its graph has given the bits
of an eager run (`Trust`). Called by `block_run`.
"""

import contextvars
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lohan.drive.activations.store import BlockChoices
from lohan.drive.captured.cut import Calls, Cut
from lohan.drive.captured.functions import (
    Backward,
    Forward,
    backward_function,
    forward_function,
)
from lohan.drive.captured.record import Arguments, Arrived, NotCapturable, Value, record
from lohan.model.tracing.blocks import is_position

_PLAIN = frozenset((bool, int, float, str, bytes, type(None), torch.dtype, torch.device))
_HOOKS = frozenset(
    ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
)
_OWN = frozenset(vars(torch.nn.Module()))
"""What every module has."""
_PASSED_OVER = _OWN - _HOOKS - {"_parameters", "_buffers", "training"}
MOST_WAYS = 64
"""In which a block is called and graphs are kept for; those not met for the longest time go."""
NEVER_AGAIN = _MOST_TRIES = 3
"""Visits after which a block that changes something as it runs is no longer looked at: what it
makes at first (a table of positions) it has made by then."""


class Graph:
    """One block at one set of shapes: recorded once for each set of gradients that arrives."""

    def __init__(self, calls: Calls, pattern: Hashable) -> None:
        self._calls = {pattern: calls}
        self._first = calls
        self._forward: dict[frozenset[int], tuple[Cut, Forward]] = {}
        self._backward: dict[tuple[Hashable, frozenset[int]], Backward | None] = {}
        self._stored_outputs: dict[frozenset[int], frozenset[int]] = {}
        self.proven: set[Hashable] = set()
        """Gradients arriving for which it gave the bits of the own code of a block."""
        recording = calls.recording
        self.outputs, self.spec = recording.outputs, recording.spec
        self.with_gradient = recording.with_gradient
        given = set(recording.storages[: recording.num_given])
        self.returns_given = any(
            recording.storages[one] in given for one in self.outputs if isinstance(one, Value)
        )
        """Whether an output is a view of what the block was given, perhaps of a weight."""
        self.draws = any(call.is_random for call in recording.calls[: recording.num_forward])
        self._operators = {
            call.ordinal: call.operator._overloadpacket.__name__
            for call in recording.calls[: recording.num_forward]
        }

    def add(self, calls: Calls, pattern: Hashable) -> None:
        """The same forward, with other gradients arriving."""
        then, now = self._first.recording, calls.recording
        if [c.operator for c in then.calls[: then.num_forward]] != [
            c.operator for c in now.calls[: now.num_forward]
        ]:
            raise NotCapturable("it runs other operators when it is captured again")
        self._calls[pattern] = calls

    def knows(self, pattern: Hashable) -> bool:
        """Whether there is a backward for it."""
        return pattern in self._calls

    def fits(self, names: Mapping[int, str]) -> bool:
        """Whether operators, by ordinal, are those that choices were made for."""
        return all(self._operators.get(ordinal, name) == name for ordinal, name in names.items())

    def forward(self, stored: frozenset[int]) -> tuple[Cut, Forward]:
        """The function, and what it hands over."""
        found = self._forward.get(stored)
        if found is None:
            cut = self._first.cut(stored)
            found = self._forward[stored] = (cut, forward_function(self._first, cut))
        return found

    def stored_outputs(self, stored: frozenset[int]) -> frozenset[int]:
        """Places among the outputs of those whose memory a forward stores."""
        found = self._stored_outputs.get(stored)
        if found is None:
            storages = self._first.recording.storages
            memory = {storages[one.value] for one in self.forward(stored)[0].stored}
            found = self._stored_outputs[stored] = frozenset(
                place
                for place, one in enumerate(self.outputs)
                if isinstance(one, Value) and storages[one] in memory
            )
        return found

    def backward(self, pattern: Hashable, stored: frozenset[int]) -> Backward | None:
        """The function for a forward with the same `stored`; None if there is none."""
        key = (pattern, stored)
        if key not in self._backward:
            before, calls = self.forward(stored)[0], self._calls[pattern]
            cut = calls.cut(stored, among={one.value for one in before.stored})
            is_known = all(
                place in before.drawn
                for place in cut.again
                if calls.recording.calls[place].is_random
            )
            self._backward[key] = backward_function(calls, cut, before) if is_known else None
        return self._backward[key]


@dataclass(slots=True)
class Trust:
    """What is known of one block called in one way."""

    fitting: BlockChoices | None = None
    """Choices that were made for the operators of the graph."""

    graph: Graph | None = None
    patterns: set[Hashable] = field(default_factory=set)
    """Gradients arriving for which the graph gave the bits of this block's own code."""
    reason: str | None = None
    """Why it is run as it is."""
    num_tries: int = 0
    num_visits: int = 0

    @property
    def is_open(self) -> bool:
        """Whether it may yet be captured."""
        return self.graph is None and self.num_tries < _MOST_TRIES


class Captures:
    """The graphs of a model's blocks, by how they are made and called; for a run, whatever its
    plans are."""

    def __init__(self) -> None:
        # As long as a block has use for them.
        self._graphs: weakref.WeakValueDictionary[Hashable, Graph] = weakref.WeakValueDictionary()
        self._trust: dict[str, dict[Hashable, Trust]] = {}
        self._told: set[Hashable] = set()
        self.refused: dict[str, str] = {}
        """Blocks that cannot be captured as they are now, and why."""
        self.unplanned: set[str] = set()
        """Blocks whose graphs have other operators than they were planned with."""
        self.unsteady: set[str] = set()
        """Blocks of which something has other bits in every run."""

    def trust(self, block: str) -> dict[Hashable, Trust]:
        """What is known of a block, by how it is called."""
        return self._trust.setdefault(block, {})

    def proven(self, key: Hashable, pattern: Hashable) -> Graph | None:
        """A graph that has given the bits of a block made and called alike."""
        known = self._graphs.get(key)
        return known if known is not None and pattern in known.proven else None

    def own_code(self) -> dict[str, str]:
        """Blocks whose own code is run in at least one way that they are called, and why."""
        found = dict(self.refused)
        for block, ways in self._trust.items():
            for one in ways.values():
                if one.reason is not None:
                    found.setdefault(block, one.reason)
        return found

    def news(self) -> list[str]:
        """A sentence for each reason that is not known yet."""
        blocks: dict[str, list[str]] = {}
        for block, reason in self.own_code().items():
            blocks.setdefault(reason, []).append(block)
        new = [reason for reason in blocks if reason not in self._told]
        self._told.update(new)
        found = [
            f"{_some(blocks[reason])}: the model's own code runs, and all of it again in backward, "
            f"because {reason}"
            for reason in new
        ]
        for which, words in (
            (
                self.unplanned,
                "other operators run than were planned for, and all of it is recomputed in "
                "backward",
            ),
            (
                self.unsteady,
                "some results have other bits in every run on this device, as they have in plain "
                "PyTorch",
            ),
        ):
            if unknown := {(block, words) for block in which} - self._told:
                found.append(f"{_some(sorted(which))}: {words}")
                self._told |= unknown
        return found

    def report(self) -> list[str]:
        """Of each block that has gone backward: captured, or why its own code runs."""
        reasons = self.own_code()
        return [
            f"{block}: {f'own code, because {reasons[block]}' if block in reasons else 'captured'}"
            for block in (*self._trust, *(self.refused.keys() - self._trust.keys()))
        ]

    def graph(
        self,
        key: Hashable,
        forward: Callable[..., Any],
        module: torch.nn.Module,
        given: Arguments,
        arrived: Arrived,
    ) -> Graph:
        """The graph of a block, recorded if none like it has been.

        Raises:
            NotCapturable: it has none.
        """
        pattern, known = arrived.pattern, self._graphs.get(key)
        if known is not None and known.knows(pattern):
            return known
        calls = Calls(record(forward, module, given, arrived))
        if known is not None:
            known.add(calls, pattern)
            return known
        graph = self._graphs[key] = Graph(calls, pattern)
        return graph


def _some(blocks: Sequence[str]) -> str:
    return f"block {blocks[0]}" if len(blocks) == 1 else f"{len(blocks)} blocks from {blocks[0]} on"


def call_key(leaves: Sequence[Any], spec: Hashable, ambient: Hashable) -> Hashable | None:
    """What a capture depends on among the arguments; None if they are more than tensors and plain
    values."""
    numbers: dict[int, int] = {}
    found: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if type(leaf) is not torch.Tensor or leaf.layout is not torch.strided:
                return None
            number = numbers.setdefault(id(leaf), len(numbers))
            found.append(
                (number, leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad)
            )
        elif type(leaf) in _PLAIN:
            found.append((type(leaf), leaf))
        else:
            return None
    return (spec, ambient, *found)


def settings_of(modules: Sequence[torch.nn.Module]) -> tuple[Hashable, str | None]:
    """What a capture depends on in a block, the first module with its parts; equal for blocks
    alike. And why it is none at all.

    Plain values in attributes of modules and of the objects they hold (a configuration), tensors
    by identity and version; a layer's own number is left out (`is_position`).
    """
    found: list[Any] = []
    seen: set[int] = set()
    for part in modules:
        found.append(type(part))
        for name, value in vars(part).items():
            if name in _PASSED_OVER:
                continue
            kind = type(value)
            if kind in _PLAIN:
                found.append("position" if kind is int and is_position(name) else value)
            elif kind is dict or kind is OrderedDict:
                if name in _HOOKS:
                    is_inside = value and part is not modules[0]
                    if is_inside and not all(map(_is_collector, value.values())):
                        return None, f"a hook is on its {type(part).__name__}"
                elif name == "_parameters" or name == "_buffers":
                    found += [None if one is None else _look(one) for one in value.values()]
                elif name not in _OWN:
                    found += [(k, v) for k, v in value.items() if type(v) in _PLAIN]
            elif isinstance(value, torch.Tensor):
                found.append((id(value), value._version))
            elif isinstance(value, (list, tuple)):
                found += [one if type(one) in _PLAIN else id(one) for one in value]
            elif name != "forward" and name not in _OWN:
                # `forward` is replaced while a step runs.
                found.append(id(value))
                if id(value) not in seen:
                    seen.add(id(value))
                    found += [
                        v for v in getattr(value, "__dict__", {}).values() if type(v) in _PLAIN
                    ]
    return tuple(found), None


def outside_values(modules: Sequence[torch.nn.Module]) -> Hashable:
    """Plain values that a block may read without being given them: in attributes of the model
    outside of it, and in context variables."""
    found = [value for part in modules for value in vars(part).values() if type(value) in _PLAIN]
    found += [value for value in contextvars.copy_context().values() if type(value) in _PLAIN]
    return tuple(found)


def _look(tensor: torch.Tensor) -> Hashable:
    return tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad


def _is_collector(hook: Any) -> bool:
    """transformers' own, whose findings `collected_outputs` returns with the block's outputs."""
    return getattr(hook, "__module__", "") == "transformers.utils.output_capturing"


def output_tensors(graph: Graph, made: Sequence[torch.Tensor]) -> list[Any]:
    """Leaves of what a block returns, from what its forward function did."""
    tensors = iter(made)
    return [next(tensors) if isinstance(one, Value) else one for one in graph.outputs]
