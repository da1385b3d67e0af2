"""Watching that a forward leaves weights alone: finds changes of any kind, in little memory."""

import pytest
import torch

from lohan.drive.watch.unchanged_weights import weights_unchanged
from lohan.errors import ConfigError
from lohan.units import MIB
from support.flat_memory import Growth

SIZES = [(512, 512), (511, 3), (7,), (1,)]


def weight(shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> torch.nn.Parameter:
    """Part of a larger buffer, as weights in flight are."""
    count = torch.Size(shape).numel()
    flat = torch.arange(count + offset, dtype=torch.float32).to(dtype)
    return torch.nn.Parameter(flat[offset:].view(shape))


@pytest.mark.parametrize("offset", [0, 4, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SIZES)
def test_a_change_behind_autograds_back_is_found(
    shape: tuple[int, ...], dtype: torch.dtype, offset: int
) -> None:
    parameter = weight(shape, dtype, offset)
    with weights_unchanged({"w": parameter}, "block", should_look_closely=True):
        parameter.sum()
    watch = weights_unchanged({"w": parameter}, "block", should_look_closely=True)
    with pytest.raises(ConfigError, match="w was changed in place by the forward of block"), watch:
        parameter.data.view(-1)[-1] = float("nan")


def test_a_change_that_autograd_sees_is_found_without_reading_values() -> None:
    parameter = weight((4,), torch.bfloat16)
    watch = weights_unchanged({"w": parameter}, "block", should_look_closely=False)
    with pytest.raises(ConfigError), watch, torch.no_grad():
        parameter.zero_()


@pytest.mark.parametrize("offset", [0, 1])
def test_reading_all_values_takes_next_to_no_memory(offset: int) -> None:
    """Budgets are planned without it, and the largest weight may be most of one."""
    parameter = weight((4096, 8192), torch.bfloat16, offset)  # 64 MiB
    with Growth() as growth, weights_unchanged({"w": parameter}, "a", should_look_closely=True):
        pass
    assert growth.peak_bytes <= 32 * MIB
