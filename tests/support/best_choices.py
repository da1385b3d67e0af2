"""The best choices there are, by mixed-integer programming: the judge of the planner's searches.

States the same decisions (KEEP, SWAP_TO_RAM, SWAP_TO_SSD or RECOMPUTE for every output of every
block, resident kinds for every block), the same budgets and the same estimate, and lets a solver
find the optimum. Only for small models.
"""

from dataclasses import dataclass

import highspy

from lohan.hardware.machine import Machine
from lohan.model.shape import INPUT
from lohan.plan import Plan
from lohan.plan.activations import swappable_indices
from lohan.plan.block_costs import traffic_of
from lohan.plan.cost import Traffic, stage_seconds
from lohan.plan.pools import trained_parameters
from lohan.vocabulary import Tier

GB = 1e9


@dataclass
class _Sums:
    """Linear expressions over the solver's variables, in FLOPs and GB."""

    recompute: object
    swapped: object
    spilled: object
    weights_read: object
    weights_written: object
    states: object


class _Solver:
    def __init__(self) -> None:
        self.highs = highspy.Highs()
        self.highs.silent()
        self.highs.setOptionValue("mip_rel_gap", 1e-6)
        self.highs.setOptionValue("time_limit", 20.0)
        # A block of one parameter is a small number of GB.
        self.highs.setOptionValue("small_matrix_value", 1e-12)

    def number(self) -> highspy.highs.highs_var:
        return self.highs.addVariable(lb=0)

    def choice(self) -> highspy.highs.highs_var:
        return self.highs.addBinary()

    def share(self) -> highspy.highs.highs_var:
        return self.highs.addVariable(lb=0, ub=1)

    def require(self, constraint: object) -> None:
        self.highs.addConstr(constraint)

    def minimum(self, expression: object) -> float | None:
        self.highs.minimize(expression)
        if self.highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        return self.highs.getObjectiveValue()


def _total(terms: list[object]) -> object:
    expression = highspy.highs.highs_linear_expression()
    for term in terms:
        expression += term
    return expression


def best_estimate(plan: Plan, machine: Machine) -> float | None:
    """The least `estimated_seconds` of any decisions within the plan's own budgets.

    None where not even one set of decisions fits. Which resource is the longest decides what
    imperfect overlap costs, so each is tried as the longest.
    """
    found = [_best_with_longest(plan, machine, longest) for longest in range(5)]
    return min((seconds for seconds in found if seconds is not None), default=None)


def _best_with_longest(plan: Plan, machine: Machine, longest: int) -> float | None:
    solver = _Solver()
    sums = _our_decisions(solver, plan, machine)
    fixed = traffic_of(plan)
    num_gpus = plan.num_gpus
    read, write = machine.ssd_read_bytes_per_second / GB, machine.ssd_write_bytes_per_second / GB
    up, down = machine.ram_to_gpu_bytes_per_second / GB, machine.gpu_to_ram_bytes_per_second / GB
    rate = machine.gpu.flops_per_second
    weights = fixed.weight_copy_bytes / GB
    swapped, spilled = sums.swapped * num_gpus, sums.spilled * num_gpus
    gradients = fixed.gradient_spill_bytes / GB

    def drives(seconds: object, reads: object, writes: object) -> None:
        """`seconds` is what the drives take: the longer direction, or both."""
        if machine.ssd_path.is_duplex:
            solver.require(seconds >= reads * (1 / read))
            solver.require(seconds >= writes * (1 / write))
        else:
            solver.require(seconds == reads * (1 / read) + writes * (1 / write))

    ssd, updates, backward_ssd = solver.number(), solver.number(), solver.number()
    states_written = sums.states + sums.weights_written
    drives(
        ssd,
        2 * sums.weights_read + sums.states + spilled + gradients,
        states_written + spilled + gradients,
    )
    drives(updates, sums.states + gradients, states_written)
    drives(backward_ssd, sums.weights_read + spilled, spilled * 0 + gradients)
    cpu = fixed.num_parameters / machine.cpu_update_parameters_per_second
    forward, backward = solver.number(), solver.number()
    solver.require(forward >= fixed.forward_flops / rate)
    solver.require(forward >= weights / up)
    solver.require(forward >= swapped * (1 / down))
    solver.require(forward >= spilled * (1 / write))
    if plan.workload.clips_gradients:
        solver.require(forward >= cpu)
        solver.require(forward >= updates)
    backward_flops = sums.recompute + fixed.backward_flops / rate
    solver.require(backward >= backward_flops)
    solver.require(backward >= swapped * (1 / up) + weights / up)
    solver.require(backward >= weights / down)
    solver.require(backward >= backward_ssd)
    resources = [
        backward_flops + fixed.forward_flops / rate,
        swapped * (1 / up) + 2 * weights / up,
        swapped * (1 / down) + weights / down,
        ssd + 0,
        swapped * 0 + cpu,
    ]
    bound = solver.number()
    solver.require(bound >= forward + backward)
    for resource in resources:
        solver.require(resources[longest] >= resource)
        solver.require(bound >= resource)
    others = _total([r for number, r in enumerate(resources) if number != longest])
    return solver.minimum(bound + 0.05 * others)


def _our_decisions(solver: _Solver, plan: Plan, machine: Machine) -> _Sums:
    """Variables and budgets of `lohan+`; recomputation in seconds, bytes in GB."""
    batch, sequence = plan.batch_per_gpu, plan.workload.sequence
    rate, mb, num_gpus = machine.gpu.flops_per_second, plan.num_micro_batches, plan.num_gpus
    recompute: list[object] = []
    in_ram: list[object] = []
    on_ssd: list[object] = []
    kept: list[object] = []
    most_swapped, most_spilled = solver.number(), solver.number()
    blocks = plan.shape.blocks
    for number, block in enumerate(blocks[:-1]):
        outputs = {INPUT: block.input_bytes.at(batch, sequence) / GB}
        if number:
            sizes = {op.index: op.output_bytes.at(batch, sequence) / GB for op in block.operators}
            outputs |= {index: sizes[index] for index in swappable_indices(block)}
        available: dict[int, object] = {}
        block_ram: list[object] = []
        block_ssd: list[object] = []
        for index, nbytes in outputs.items():
            keep, ram, ssd = solver.choice(), solver.choice(), solver.choice()
            solver.require(keep + ram + ssd <= 1)
            if index == INPUT:
                solver.require(keep + ram + ssd == 1)
            available[index] = keep + ram + ssd
            kept.append(keep * nbytes)
            block_ram.append(ram * nbytes)
            block_ssd.append(ssd * nbytes)
        if number:
            recompute += _recomputed(solver, block, available, batch, sequence, rate)
        solver.require(most_swapped >= _total(block_ram) + _total(block_ssd))
        solver.require(most_spilled >= _total(block_ssd))
        in_ram += block_ram
        on_ssd += block_ssd
    weights_read: list[object] = []
    weights_written: list[object] = []
    states: list[object] = []
    resident: list[object] = []
    trained = trained_parameters(plan.shape)
    for block, count in zip(blocks, trained, strict=True):
        weights, others = solver.choice(), solver.choice()
        resident += [weights * (2 * block.num_parameters / GB), others * (10 * count / GB)]
        weights_read.append((1 - weights) * (2 * block.num_parameters / GB))
        weights_written.append((1 - weights) * (2 * count / GB))
        states.append((1 - others) * (10 * count / GB))
    decided = {"swapped activations", "activations on their way", "resident states"}
    decided_gpu = {"activations on their way", "activations kept"}
    ledger = plan.ledger
    ram_left = ledger.budgets[Tier.RAM] - sum(
        line.nbytes for line in ledger.lines_of(Tier.RAM) if line.purpose not in decided
    )
    head_input = blocks[-1].input_bytes.at(batch, sequence)
    gpu_left = (
        ledger.budgets[Tier.GPU]
        - head_input
        - sum(line.nbytes for line in ledger.lines_of(Tier.GPU) if line.purpose not in decided_gpu)
    )
    solver.require(
        _total(in_ram) * num_gpus
        + most_spilled * (plan.system.num_spill_slots * num_gpus)
        + _total(resident)
        <= max(0, ram_left) / GB
    )
    solver.require(_total(kept) + most_swapped * (2 / mb) <= max(0, gpu_left) / GB)
    return _Sums(
        recompute=_total(recompute),
        swapped=_total(in_ram) + _total(on_ssd),
        spilled=_total(on_ssd),
        weights_read=_total(weights_read),
        weights_written=_total(weights_written),
        states=_total(states),
    )


def _recomputed(
    solver: _Solver,
    block: object,
    available: dict[int, object],
    batch: int,
    sequence: int,
    rate: float,
) -> list[object]:
    """Seconds of the operators run again: those kept by autograd or read by one run again."""
    again = {op.index: solver.share() for op in block.operators}  # type: ignore[attr-defined]
    terms = []
    for op in block.operators:  # type: ignore[attr-defined]
        at_hand = available.get(op.index, 0)
        if op.is_saved:
            solver.require(again[op.index] + at_hand >= 1)
        for read in op.inputs:
            if read != INPUT:
                solver.require(again[read] + available.get(read, 0) >= again[op.index])
        terms.append(again[op.index] * (op.forward_flops.at(batch, sequence) / rate))
    return terms


def best_stage_seconds(plan: Plan, machine: Machine, ram_bytes: int) -> float | None:
    """The least `stage_seconds` of any outputs swapped to RAM or SSD: the paper's problem."""
    solver = _Solver()
    batch, sequence = plan.batch_per_gpu, plan.workload.sequence
    num_gpus, rate = plan.num_gpus, machine.gpu.flops_per_second
    fixed = traffic_of(plan)
    flops = fixed.forward_flops
    in_ram: list[object] = []
    on_ssd: list[object] = []
    recompute: list[object] = []
    for number, block in enumerate(plan.shape.blocks[:-1]):
        outputs = {INPUT: block.input_bytes.at(batch, sequence) / GB}
        sizes = {op.index: op.output_bytes.at(batch, sequence) / GB for op in block.operators}
        if number:
            outputs |= {i: sizes[i] for i in swappable_indices(block) if sizes[i]}
        for index, nbytes in outputs.items():
            ram, ssd = solver.choice(), solver.choice()
            solver.require(ram + ssd <= 1)
            if index == INPUT:
                solver.require(ram + ssd == 1)
            in_ram.append(ram * nbytes)
            on_ssd.append(ssd * nbytes)
            if index != INPUT:
                op = next(op for op in block.operators if op.index == index)
                cost = op.forward_flops.at(batch, sequence) / rate
                recompute.append((1 - ram - ssd) * cost)
        if number:
            recompute += [
                solver.number() * 0 + op.forward_flops.at(batch, sequence) / rate
                for op in block.operators
                if op.index not in outputs
            ]
    solver.require(_total(in_ram) * num_gpus <= ram_bytes / GB)
    swapped = (_total(in_ram) + _total(on_ssd)) * num_gpus
    spilled = _total(on_ssd) * num_gpus
    interference = plan.system.rates.copy_interference
    read, write = machine.ssd_read_bytes_per_second / GB, machine.ssd_write_bytes_per_second / GB
    up, down = machine.ram_to_gpu_bytes_per_second / GB, machine.gpu_to_ram_bytes_per_second / GB
    state, parameters = plan.system.state, plan.shape.num_parameters / GB
    forward, backward = solver.number(), solver.number()
    copies = 2 * parameters * num_gpus
    solver.require(forward >= swapped * (interference / down) + flops / rate)
    solver.require(forward >= swapped * (1 / down))
    solver.require(forward >= copies / up)
    solver.require(forward >= spilled * (1 / write) + 2 * parameters / read)
    solver.require(backward >= _total(recompute) + 2 * flops / rate + swapped * (interference / up))
    solver.require(backward >= copies / down)
    solver.require(backward >= swapped * (1 / up) + copies / up)
    states = parameters * (state.master_bytes + state.moments_bytes)
    solver.require(
        backward
        >= spilled * (1 / read)
        + (2 * parameters + states) / read
        + parameters * state.stored_bytes / write
    )
    return solver.minimum(forward + backward)


def planned_stage_seconds(plan: Plan, machine: Machine) -> float:
    """The paper's form for a plan as its blocks really decide."""
    traffic = traffic_of(plan)
    state, parameters = plan.system.state, plan.shape.num_parameters
    return stage_seconds(
        machine,
        Traffic(
            forward_flops=traffic.forward_flops,
            backward_flops=2 * traffic.forward_flops,
            recompute_flops=traffic.recompute_flops,
            num_parameters=parameters,
            swapped_bytes=traffic.swapped_bytes,
            spilled_bytes=traffic.spilled_bytes,
            state_read_bytes=parameters * (state.master_bytes + state.moments_bytes),
            state_written_bytes=parameters * state.stored_bytes,
            weight_read_bytes=2 * parameters,
            weight_copy_bytes=2 * parameters * plan.num_gpus,
        ),
        copy_interference=plan.system.rates.copy_interference,
    )
