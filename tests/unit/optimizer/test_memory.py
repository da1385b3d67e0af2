"""Arrays are checked before a kernel sees their address."""

import numpy
import pytest
import torch

from lohan import _native
from lohan.errors import ConfigError, HardwareError
from lohan.optimizer import (
    AdamWSettings,
    MemoryRange,
    NumberFormat,
    PlainState,
    SplitState,
    available_isas,
    update_states,
)

NUM = 8


def split(**changed):
    arrays = {
        "p16": torch.ones(NUM, dtype=torch.bfloat16),
        "lo16": torch.zeros(NUM, dtype=torch.int16),
        "m32": torch.zeros(NUM),
        "v32": torch.zeros(NUM),
    }
    return SplitState(**{**arrays, **changed})


def step(grad, state, **more):
    update_states(grad, state, settings=AdamWSettings(lr=0.1), step=1, **more)


GRAD = torch.ones(NUM, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"m32": torch.zeros(NUM, dtype=torch.float64)}, "m32 is of format float64"),
        ({"lo16": torch.zeros(NUM, dtype=torch.int8)}, "lo16 is of format int8"),
        ({"p16": torch.zeros(NUM, dtype=torch.float16)}, "p16 is of format float16"),
        ({"v32": torch.zeros(NUM - 1)}, "v32 has 7 elements, 8 expected"),
        ({"v32": torch.zeros(2 * NUM)[::2]}, "v32 is not contiguous"),
        ({"m32": torch.zeros(NUM, device="meta")}, "m32 is on meta"),
        ({"m32": [0.0] * NUM}, "m32 is a list: its memory cannot be found"),
        ({"m32": numpy.zeros(2 * NUM, dtype=numpy.float32)[::2]}, "m32 is not contiguous"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changed, message):
    with pytest.raises(ConfigError, match=message):
        step(GRAD, split(**changed))


def test_read_only_arrays_are_refused():
    frozen = numpy.zeros(NUM, dtype=numpy.float32)
    frozen.flags.writeable = False
    with pytest.raises(ConfigError, match="m32 is read-only"):
        step(GRAD, split(m32=frozen))


def test_integer_gradients_must_say_what_they_are():
    with pytest.raises(ConfigError, match="grad is of format int16"):
        step(GRAD.view(torch.int16), split())


def test_overlapping_arrays_are_refused_and_nothing_changes():
    room = torch.zeros(NUM + 4)
    with pytest.raises(ConfigError, match="m32 and v32 overlap"):
        step(GRAD, split(m32=room[:NUM], v32=room[4:]))
    assert bool((room == 0).all())


def test_misaligned_addresses_are_refused():
    room = torch.zeros(NUM + 1)
    odd = MemoryRange(
        address=room.data_ptr() + 2, num_elements=NUM, number_format=NumberFormat.FP32
    )
    with pytest.raises(ConfigError, match="not a multiple of 4 bytes"):
        step(GRAD, split(m32=odd))


@pytest.mark.parametrize(("address", "count"), [(-4, NUM), (0, NUM)])
def test_impossible_addresses_are_refused(address, count):
    memory = MemoryRange(address=address, num_elements=count, number_format=NumberFormat.FP32)
    with pytest.raises(ConfigError, match="address"):
        step(GRAD, split(m32=memory))


def test_numpy_arrays_and_addresses_work_like_tensors():
    expected, state = split(), split()
    step(GRAD, expected)
    raw = state.p16.view(torch.int16).numpy()
    address = MemoryRange(
        address=state.m32.data_ptr(), num_elements=NUM, number_format=NumberFormat.FP32
    )
    step(GRAD, split(p16=raw, lo16=state.lo16.numpy().view(numpy.uint16), m32=address))
    assert torch.equal(state.p16, expected.p16)
    assert torch.equal(state.m32, expected.m32)
    assert not torch.equal(state.m32, torch.zeros(NUM))


@pytest.mark.parametrize("num_threads", [0, -1, 1.5, True])
def test_thread_counts_are_checked(num_threads):
    with pytest.raises(ConfigError, match="num_threads is"):
        step(GRAD, split(), num_threads=num_threads)


def test_more_threads_than_work_are_harmless():
    state = split()
    step(GRAD, state, num_threads=10**6)
    assert bool((state.m32 != 0).all())


def test_an_instruction_set_this_processor_lacks_is_refused():
    with pytest.raises(HardwareError, match="available are"):
        step(GRAD, split(), isa="mmx")
    lacking = set(_native.compiled_kernel_isas()) - set(_native.available_kernel_isas())
    for isa in lacking:
        with pytest.raises(HardwareError):
            step(GRAD, split(), isa=isa)


def test_the_chosen_instruction_set_is_the_first_available():
    assert _native.kernel_isa() == _native.available_kernel_isas()[0]
    assert _native.available_kernel_isas()[-1] in ("portable", "neon")


def test_plain_state_checks_its_p16():
    state = PlainState(
        p32=torch.ones(NUM),
        m32=torch.zeros(NUM),
        v32=torch.zeros(NUM),
        p16=torch.zeros(NUM, dtype=torch.int16),
    )
    with pytest.raises(ConfigError, match="p16 is of format int16"):
        update_states(GRAD, state, settings=AdamWSettings(lr=0.1), step=1)


def native_arguments(**changed):
    arrays = {name: torch.zeros(NUM) for name in ("p16", "lo16", "m32", "v32")}
    arguments = {name: array.data_ptr() for name, array in arrays.items()}
    arguments |= {"grad": GRAD.data_ptr(), "grad_format": "bf16", "num_elements": NUM}
    arguments |= {"ranges": [(0, NUM, 0.1, 0.0)], "scalars": (0.9, 0.1, 0.9, 0.1, 0.0, 1.0)}
    return {**arguments, "num_threads": 1, **changed}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"grad_format": "fp8"}, "none of bf16, fp16, fp32"),
        ({"num_threads": 0}, "num_threads is 0"),
        ({"isa": "mmx"}, "'mmx' is not available here"),
        ({"ranges": [(0, NUM + 1, 0.1, 0.0)]}, "must ascend"),
        ({"ranges": [(3, 2, 0.1, 0.0)]}, "must ascend"),
        ({"ranges": [(2, 4, 0.1, 0.0), (3, 5, 0.1, 0.0)]}, "must ascend"),
        ({"num_elements": 2**61}, "beyond the address space"),
    ],
)
def test_the_native_call_itself_refuses_bad_arguments(changed, message):
    with pytest.raises(ValueError, match=message):
        _native.adamw_split(**native_arguments(**changed))


def test_a_sparse_tensor_and_a_negated_view_are_refused():
    with pytest.raises(ConfigError, match="does not hold its values as they are"):
        step(torch.ones(NUM), split(m32=torch.zeros(NUM).to_sparse()))
    with pytest.raises(ConfigError, match="or it is a negated view"):
        step(torch.ones(NUM), split(m32=torch._neg_view(torch.zeros(NUM))))


def test_an_address_of_more_than_64_bits_is_refused():
    beyond = MemoryRange(address=2**64, num_elements=NUM, number_format=NumberFormat.FP32)
    with pytest.raises(ConfigError, match="an address has 64 bits"):
        step(torch.ones(NUM), split(m32=beyond))


def test_the_instruction_sets_of_this_processor_are_told_best_first():
    isas = available_isas()
    assert isas[0] == _native.kernel_isa()
    assert set(isas) <= set(_native.compiled_kernel_isas())
