"""The two halves of a cut block as plain Python functions, one line per operator.

Owns the writing of that code: values live in local variables and are let go of after their last
use, stored ones are handed over as soon as their content is final, gradients as soon as they are
whole. The functions run without autograd, modules or hooks. Called by `captures`.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lohan.drive.captured.cut import Calls, Cut
from lohan.drive.captured.record import Call, Value

Forward = Callable[[list[Any], Callable[[int, Any], None], Callable[[int], None]], tuple[Any, ...]]
"""Takes the inputs, what takes stored tensors (by place in `Cut.stored`), and what notes the state
of the generators (by place in `Cut.drawn`); returns the tensors among the outputs."""
Backward = Callable[
    [
        list[Any],
        Callable[[int], Any],
        Callable[[int], None],
        Callable[[], None],
        Callable[[int, Any], None],
    ],
    None,
]
"""Takes the inputs with the gradients that arrived (and empties the list), what gives stored
tensors, what sets the generators as they were, what is told that all is there that is run again,
and what takes each gradient (by place in `Recording.gradients`)."""

_METHODS = (
    *("add", "clone", "expand", "mean", "mm", "mul", "neg", "permute", "pow", "rsqrt", "select"),
    *("squeeze", "sub", "sum", "t", "transpose", "unsqueeze", "view"),
)
"""Operators that tensors have as methods with the same arguments, which the host calls in less time
than operators by their overload."""


def forward_function(calls: Calls, cut: Cut) -> Forward:
    """The first half."""
    recording = calls.recording
    code = _Code(calls, [])
    draws = {place: number for number, place in enumerate(cut.drawn)}
    handed: dict[int, list[str]] = {}
    for number, one in enumerate(cut.stored):
        handed.setdefault(one.after, []).append(f"put({number}, {code.name(one.value)})")
    for place in cut.forward:
        if place in draws:
            code.say(f"note({draws[place]})")
        code.call(recording.calls[place])
        for line in handed.get(place, ()):
            code.say(line)
    outputs = [one for one in recording.outputs if isinstance(one, Value)]
    code.say(f"return ({''.join(code.name(one) + ', ' for one in outputs)})")
    made: Forward = code.function("forward", "given, put, note")
    return made


def backward_function(calls: Calls, cut: Cut, before: Cut) -> Backward:
    """The second half: stored values are fetched, the others made again. `before`: the cut whose
    forward ran, whose places `get` and `reset` are given."""
    recording = calls.recording
    code = _Code(calls, recording.starts)
    places = {one.value: place for place, one in enumerate(before.stored)}
    fetched = {
        one.value: f"{code.name(one.value)} = get({places[one.value]})" for one in cut.stored
    }
    draws = {place: number for number, place in enumerate(before.drawn)}
    whole: dict[int, list[str]] = {}
    for number, gradient in enumerate(recording.gradients):
        if gradient is not None:
            line = f"deliver({number}, {code.name(gradient)})"
            whole.setdefault(calls.final(gradient), []).append(line)

    def run(places: Sequence[int]) -> None:
        for place in places:
            if place in draws:
                code.say(f"reset({draws[place]})")
            for value in recording.calls[place].reads:
                if value in fetched:
                    code.say(fetched.pop(value))
            code.call(recording.calls[place])
            for line in whole.pop(place, ()):
                code.say(line)

    code.say("given.clear()")
    run(cut.again)
    code.say("begun()")
    run(cut.backward)
    for lines in whole.values():
        # A gradient that arrived is handed on, or a forward value is one.
        for line in lines:
            code.say(line)
    made: Backward = code.function("backward", "given, get, reset, begun, deliver")
    return made


class _Code:
    """Lines of a function, and the constants that they name."""

    def __init__(self, calls: Calls, more: Sequence[Value]) -> None:
        self._constants: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        self._lines: list[str] = []
        self._given = [f"v{value}" for value in (*range(calls.recording.num_given), *more)]
        for value, tensor in calls.recording.constants.items():
            self._constants[self.name(value)] = tensor

    def name(self, value: Value) -> str:
        return f"v{value}"

    def say(self, line: str) -> None:
        self._lines.append(line)

    def call(self, call: Call) -> None:
        text = [self._text(one) for one in call.args]
        text += [f"{name}={self._text(one)}" for name, one in call.kwargs.items()]
        name = call.operator._overloadpacket.__name__
        does = getattr(torch.Tensor, name) if name in _METHODS else call.operator._op
        line = f"{self._constant(does)}({', '.join(text)})"
        if any(value is not None for value in call.outputs):
            names = ["_" if value is None else self.name(value) for value in call.outputs]
            if not call.is_single:
                line = f"{''.join(one + ', ' for one in names)} = {line}"
            else:
                line = f"{names[0]} = {line}"
        self.say(line)

    def _text(self, argument: Any) -> str:
        if isinstance(argument, Value):
            return self.name(argument)
        if isinstance(argument, list):
            return f"[{', '.join(map(self._text, argument))}]"
        if isinstance(argument, tuple):
            return f"({''.join(self._text(one) + ', ' for one in argument)})"
        if argument is None or type(argument) in (bool, int):
            return repr(argument)
        return self._constant(argument)

    def _constant(self, value: Any) -> str:
        known = self._names.get(id(value))
        if known is None:
            known = self._names[id(value)] = f"c{len(self._constants)}"
            self._constants[known] = value
        return known

    def function(self, name: str, arguments: str) -> Any:
        """The function; a value is let go of after the last line that names it."""
        lines = [f"{', '.join(self._given)}, = given", *self._lines] if self._given else self._lines
        lines = _with_deletions(lines, set(self._constants))
        source = f"def {name}({arguments}):\n" + "".join(f"    {line}\n" for line in lines)
        scope = dict(self._constants)
        exec(compile(source, f"<captured {name}>", "exec"), scope)
        return scope[name]


def _with_deletions(lines: list[str], constants: set[str]) -> list[str]:
    used = [re.findall(r"\bv\d+\b", line) for line in lines]
    last: dict[str, int] = {}
    for place, names in enumerate(used):
        for name in names:
            if name not in constants:
                last[name] = place
    ending: dict[int, list[str]] = {}
    for name, place in last.items():
        ending.setdefault(place, []).append(name)
    found = []
    for place, line in enumerate(lines):
        found.append(line)
        if place in ending and not line.startswith("return"):
            found.append(f"del {', '.join(ending[place])}")
    return found
