import json

import pytest

from lohan.errors import ConfigError
from lohan.hardware.presets import machine_named
from lohan.model.names import shape_of
from lohan.paper import POLICY_NAMES, policy_named
from lohan.plan import Workload, make_plan
from lohan.plan.run_room import STATES, parts_of
from lohan.units import GIB
from lohan.vocabulary import BlockId, Choice, TensorKind, Tier
from support.hand_made import block, machine, model, operator

WORKLOAD = Workload(batch=8, sequence=1024)


def test_unknown_policy_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"lohan\+"):
        policy_named("lohan++")


def test_by_name_the_planner_knows_its_own_policy_only() -> None:
    given = (machine_named("paper-4090"), shape_of("gpt-6b"), WORKLOAD)
    assert make_plan("lohan+", *given) == make_plan(policy_named("lohan+"), *given)
    assert make_plan(policy_named("lohan"), *given).policy == "lohan"
    with pytest.raises(ConfigError, match=r"by name only lohan\+") as caught:
        make_plan("lohan", *given)
    assert "policy_named" in caught.value.remedy


def test_batch_that_does_not_divide_over_the_gpus_is_refused_by_every_policy() -> None:
    two = machine_named("paper-4090").with_gpus(2)
    for policy in POLICY_NAMES:
        with pytest.raises(ConfigError, match="does not divide"):
            policy_named(policy).plan(two, shape_of("gpt-6b"), Workload(batch=3, sequence=1024))


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_models_of_very_few_blocks_have_a_plan(policy: str, num_blocks: int) -> None:
    shape = model(*[block(operator(0))] * num_blocks)
    plan = policy_named(policy).plan(machine(), shape, Workload(batch=1, sequence=16))
    assert len(plan.blocks) == num_blocks


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_tensors_between_blocks_are_always_at_hand_for_the_backward_pass(policy: str) -> None:
    plan = policy_named(policy).plan(machine_named("paper-4090"), shape_of("gpt-6b"), WORKLOAD)
    assert all(decisions.input_choice is not Choice.RECOMPUTE for decisions in plan.blocks)


def test_resident_kinds_change_their_home_only_where_the_home_is_the_ssd() -> None:
    plan = make_plan("lohan+", machine_named("paper-4090"), shape_of("gpt-6b"), WORKLOAD)
    assert plan.home_of(BlockId(1), TensorKind.P16) is Tier.RAM
    assert plan.ssd_weights_bytes(BlockId(1), is_fresh=False) == 0
    small = machine_named("paper-4090").with_ram(24 * GIB)
    streamed = policy_named("lohan").plan(small, shape_of("gpt-6b"), WORKLOAD)
    assert streamed.home_of(BlockId(1), TensorKind.P16) is Tier.SSD
    number = streamed.block_shape(BlockId(1)).num_parameters
    assert streamed.ssd_weights_bytes(BlockId(1), is_fresh=False) == 2 * number


def test_frozen_model_needs_no_states_and_no_gradients() -> None:
    frozen = [block(operator(0), num_parameters=10**9, frozen=10**9)] * 3
    tuned = block(operator(0), num_parameters=10**6)
    box = machine(ram_gb=9)
    plan = make_plan("lohan+", box, model(*frozen, tuned), Workload(batch=1, sequence=16))
    states = [line for line in plan.ledger.lines_of(Tier.SSD) if line.purpose.startswith("states")]
    resident = []
    for kind, one in zip(plan.shape.blocks, plan.blocks, strict=True):
        trained = kind.num_parameters - kind.num_frozen_parameters
        if TensorKind.P16 in one.residents:
            resident.append(2 * kind.num_frozen_parameters + 2 * 2 * trained)
        if TensorKind.OS32 in one.residents:
            resident.append(2 * 10 * trained)
    stored = states[0].nbytes + sum(resident)
    # 2 bytes for what is frozen, two slots of 12 bytes for what is trained.
    assert stored == 2 * 3 * 10**9 + 2 * 12 * 10**6
    # What lives in RAM has its place on SSD all the same.
    assert parts_of(plan)[STATES] == 2 * 3 * 10**9 + 2 * 12 * 10**6
    gradients = [line.nbytes for line in plan.ledger.lines if line.purpose == "gradients"]
    assert gradients == [2 * 2 * 10**6]


def test_plan_as_json_lists_runs_of_equal_blocks() -> None:
    plan = policy_named("lohan").plan(machine_named("paper-4090"), shape_of("gpt-6b"), WORKLOAD)
    written = json.loads(plan.to_json())
    assert written["policy"] == "lohan"
    assert written["blocks"][0]["first"] == 0
    assert written["blocks"][-1]["last"] == plan.shape.num_blocks - 1
    assert sum(run["last"] - run["first"] + 1 for run in written["blocks"]) == len(plan.blocks)
    assert len(written["blocks"]) < len(plan.blocks)


def test_a_matrix_too_large_to_move_does_not_fit_however_large_the_gpu() -> None:
    huge = machine_named("paper-4090").with_gpu_memory(1000 * GIB)
    plan = policy_named("lohan").plan(huge, shape_of("gpt-412b"), Workload(batch=1, sequence=1024))
    assert Tier.GPU in plan.ledger.shortages()


def test_clipped_gradients_wait_where_the_plan_fits() -> None:
    workload = Workload(batch=8, sequence=1024, clips_gradients=True)
    for ram in (40, 64, 768):
        box = machine_named("paper-4090").with_ram(ram * GIB)
        plan = make_plan("lohan+", box, shape_of("gpt-13b"), workload)
        assert plan.ledger.fits, ram
        assert all(decisions.defers_update for decisions in plan.blocks)
        assert (plan.gradient_slots is None) != plan.system.spills_gradients
