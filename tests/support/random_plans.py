"""Random models, machines and plans for judging planner, schedule and simulator.

Seeded, so a failing case is named by its seed. Sizes are small but lopsided on purpose: blocks
without parameters, frozen ones, tied ones, a head larger than everything else.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

from lohan.hardware.machine import Gpu, Machine, Ssd, SsdPath
from lohan.model.shape import INPUT, BlockShape, Growth, ModelShape, OperatorShape
from lohan.paper import POLICY_NAMES, policy_named
from lohan.plan import Plan, Workload
from lohan.schedule import RollingSchedule, Schedule, Task
from lohan.vocabulary import Lane, TaskId

MB = 10**6


def random_operators(rng: random.Random, count: int) -> tuple[OperatorShape, ...]:
    operators = []
    for index in range(count):
        inputs = rng.sample(range(index), k=min(index, rng.randint(0, 2))) or [INPUT]
        flops = rng.choice((0, rng.randint(1, 40) * 10**6))
        nbytes = rng.randint(1, 64) * 256
        operators.append(
            OperatorShape(
                index=index,
                name=f"op{index}",
                inputs=tuple(inputs),
                output_bytes=Growth(per_token=nbytes if flops else rng.choice((0, nbytes))),
                forward_flops=Growth(per_token=flops),
                backward_flops=Growth(per_token=2 * flops),
                is_saved=rng.random() < 0.7,
            )
        )
    return tuple(operators)


def random_block(
    rng: random.Random, name: str, *, num_operators: int, largest: int = 60 * MB
) -> BlockShape:
    num_parameters = rng.choice((0, rng.randint(1, 1000), rng.randint(MB, largest)))
    frozen = rng.choice((0, 0, num_parameters, num_parameters // 3))
    between = Growth(per_token=rng.randint(1, 32) * 256)
    return BlockShape(
        name=name,
        num_parameters=num_parameters,
        num_frozen_parameters=frozen,
        operators=random_operators(rng, num_operators),
        input_bytes=Growth() if name == "embedding" else between,
        output_bytes=between,
    )


def random_shape(rng: random.Random, *, most_blocks: int = 30) -> ModelShape:
    num_blocks = rng.choice((1, 2, 3, rng.randint(4, most_blocks)))
    kinds = [
        random_block(rng, "embedding", num_operators=1, largest=200 * MB),
        random_block(rng, "block", num_operators=rng.randint(1, 6)),
        random_block(rng, "other", num_operators=rng.randint(1, 6)),
        random_block(rng, "head", num_operators=2, largest=200 * MB),
    ]
    inner = [rng.choice((1, 1, 2)) for _ in range(max(0, num_blocks - 2))]
    sequence = [0, *inner, 3][:num_blocks] if num_blocks > 1 else [1]
    tied = ()
    if num_blocks > 1 and kinds[0].num_parameters and rng.random() < 0.4:
        tied = ((0, num_blocks - 1, rng.randint(1, kinds[0].num_parameters)),)
    if not any(kinds[kind].num_parameters for kind in sequence):
        kinds[sequence[-1]] = random_block(random.Random(1), "head", num_operators=2)
    return ModelShape(
        name=f"random-{num_blocks}",
        kinds=tuple(kinds),
        sequence_of_kinds=tuple(sequence),
        tied=tied,
    )


def random_machine(rng: random.Random, *, num_gpus: int | None = None) -> Machine:
    drive = Ssd(
        name="drive",
        read_bytes_per_second=rng.uniform(0.5, 10) * 1e9,
        write_bytes_per_second=rng.uniform(0.3, 8) * 1e9,
        capacity_bytes=4 * 10**12,
        endurance_bytes=10**15,
        price_dollars=100,
    )
    return Machine(
        name="random",
        gpu=Gpu(
            name="gpu",
            memory_bytes=int(10 ** rng.uniform(9, 11)),
            flops_per_second=10 ** rng.uniform(12, 14.5),
            memory_bytes_per_second=1e12,
            price_dollars=1000,
        ),
        num_gpus=rng.choice((1, 1, 2, 4)) if num_gpus is None else num_gpus,
        ram_bytes=int(10 ** rng.uniform(9, 11.5)),
        ram_to_gpu_bytes_per_second=rng.uniform(2, 30) * 1e9,
        gpu_to_ram_bytes_per_second=rng.uniform(2, 30) * 1e9,
        cpu_update_parameters_per_second=10 ** rng.uniform(8, 10),
        ssds=(drive,) * rng.randint(1, 3),
        ssd_path=SsdPath(
            is_duplex=rng.random() < 0.5,
            read_ceiling_bytes_per_second=20e9,
            write_ceiling_bytes_per_second=20e9,
            is_pipelined=rng.random() < 0.5,
        ),
        host_price_dollars=1000,
    )


def random_plan(
    seed: int,
    *,
    policy: str | None = None,
    most_blocks: int = 30,
    is_plain: bool = False,
    ram_bytes: int | None = None,
) -> tuple[Plan, Machine]:
    """A plan of a random policy, fitting or not, and its machine.

    `is_plain`: one GPU, no shared weights, no clipping. `ram_bytes`: in place of a random RAM.
    """
    rng = random.Random(seed)
    machine = random_machine(rng, num_gpus=1 if is_plain else None)
    if ram_bytes is not None:
        machine = machine.with_ram(ram_bytes)
    shape = random_shape(rng, most_blocks=most_blocks)
    if is_plain:
        shape = replace(shape, tied=())
    workload = Workload(
        batch=machine.num_gpus * rng.choice((1, 2, 4, 6)),
        sequence=rng.choice((16, 128, 1024)),
        clips_gradients=not is_plain and rng.random() < 0.5,
    )
    name = policy or rng.choice(POLICY_NAMES)
    return policy_named(name).plan(machine, shape, workload), machine


def rolled_schedule(rolling: RollingSchedule, tasks: Sequence[Task], plan: Plan) -> Schedule:
    """Passes that rolled on, as one schedule in the order they were given out."""
    lanes: dict[Lane, list[TaskId]] = {}
    for task in tasks:
        lanes.setdefault(task.lane, []).append(task.id)
    return Schedule(
        tasks=tuple(tasks),
        lanes={lane: tuple(ids) for lane, ids in lanes.items()},
        pools=rolling.pools,
        num_steps=rolling.num_passes,
        num_blocks=plan.shape.num_blocks,
    )
