"""Find the blocks of an ordinary module: the members of its longest lists of repeated blocks.

Owns the rule of what a block is. Does not run the module and changes nothing in it. Used by the
tracer and by the engine, which cuts the model at the same places. Imports torch.
"""

import functools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from lohan.errors import ConfigError

MIN_LIST_SHARE = 0.05
"""A list beside the main one is cut into blocks only if it holds this share of the parameters."""
MOST_IN_ONE_BLOCK = 100_000_000
"""Parameters of a model without a list that is run as one block."""

_INDEX_NAME = re.compile(r"(idx|index|(layer|block)_?(id|num|number))$")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundBlock:
    """A block as it sits in the user's module.

    Attributes:
        name: path of the block, such as `model.layers.3`.
        list_name: path of the list it is in, such as `model.layers`.
        position: its place among the blocks of that list.
        is_last: no block of that list comes after it.
        module: the block itself.
    """

    name: str
    list_name: str
    position: int
    is_last: bool
    module: nn.Module


def find_blocks(model: nn.Module) -> tuple[FoundBlock, ...]:
    """Return the blocks in the order they are registered, lists one after the other.

    A list is a `ModuleList` all of whose members have parameters and submodules (they may be of
    different classes), or the longest run of such members of one class in a `Sequential`. Lists
    inside a block are part of it. Beside the largest list, those with a fair share of the
    parameters count too (an encoder and a decoder). A small model without any is one block.

    Raises:
        ConfigError: if there is no such list, and the model is large or has no parameters.
    """
    candidates = list(_lists(model, ""))
    # One block is a degenerate list: taken only when nothing repeats.
    lists = [found for found in candidates if len(found) > 1] or candidates
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if not lists and 0 < num_parameters <= MOST_IN_ONE_BLOCK:
        return (FoundBlock(name="", list_name="", position=0, is_last=True, module=model),)
    if not lists:
        raise ConfigError(
            f"no repeated blocks were found in {type(model).__name__}, of {num_parameters:,} "
            "parameters",
            why="a ModuleList (or a Sequential) whose members have parameters and submodules of "
            f"their own was looked for; the module's parts are {_parts(model)}; as one block all "
            "parameters would have to be on the GPU together",
            remedy="put the model's blocks into a torch.nn.ModuleList",
        )
    sizes = [_num_parameters(found) for found in lists]
    least = MIN_LIST_SHARE * num_parameters
    return tuple(
        block
        for found, size in zip(lists, sizes, strict=True)
        if size >= least or size == max(sizes)
        for block in found
    )


def structure_of(block: FoundBlock) -> object:
    """Return a value that is equal for blocks with the same structure and settings.

    Classes, parameters (shape, dtype, frozen or not) and plain settings of every submodule are
    compared; an index that is the block's own position (`layer_idx`) is not.
    """
    position = block.position
    return tuple(
        (name, type(module), tuple(_tensors(module)), tuple(_settings(module, position)))
        for name, module in block.module.named_modules()
    )


@functools.cache
def is_position(name: str) -> bool:
    """Whether an attribute of this name holds a layer's own number."""
    return _INDEX_NAME.search(name) is not None


def _tensors(module: nn.Module) -> Iterator[object]:
    for name, parameter in module.named_parameters(recurse=False):
        yield name, tuple(parameter.shape), parameter.dtype, parameter.requires_grad
    for name, buffer in module.named_buffers(recurse=False):
        yield name, tuple(buffer.shape), buffer.dtype


def _settings(module: nn.Module, position: int) -> Iterator[object]:
    for name, value in sorted(vars(module).items()):
        if type(value) is int and is_position(name) and value - position in (0, 1):
            yield name, "position"  # Counted from 0 or from 1.
        elif type(value) is float:
            # A rate or an epsilon changes the shape of a computation only by being zero.
            yield name, value == 0
        elif type(value) in (bool, int, str, type(None)):
            yield name, value


def _lists(module: nn.Module, path: str) -> Iterator[list[FoundBlock]]:
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        members = _members(child)
        if members:
            yield [
                FoundBlock(
                    name=f"{child_path}.{key}",
                    list_name=child_path,
                    position=position,
                    is_last=position == len(members) - 1,
                    module=member,
                )
                for position, (key, member) in enumerate(members)
            ]
        else:
            yield from _lists(child, child_path)


def _members(container: nn.Module) -> list[tuple[str, nn.Module]]:
    if not isinstance(container, nn.ModuleList | nn.Sequential):
        return []
    children = list(container.named_children())
    if isinstance(container, nn.ModuleList):
        return children if all(_is_block(child) for _, child in children) else []
    runs: list[list[tuple[str, nn.Module]]] = []
    for name, child in children:
        if not _is_block(child):
            runs.append([])
        elif runs and runs[-1] and type(runs[-1][-1][1]) is type(child):
            runs[-1].append((name, child))
        else:
            runs.append([(name, child)])
    longest = max(runs, key=len, default=[])
    # A Sequential is more often a pipeline than a list: one member proves nothing.
    return longest if len(longest) > 1 else []


def _is_block(module: nn.Module) -> bool:
    has_parts = next(module.children(), None) is not None
    return has_parts and next(module.parameters(), None) is not None


def _num_parameters(blocks: list[FoundBlock]) -> int:
    unique = {id(p): p.numel() for block in blocks for p in block.module.parameters()}
    return sum(unique.values())


def _parts(model: nn.Module) -> str:
    counts = Counter(type(child).__name__ for child in model.children())
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"
