"""Whatever is pushed, a queue serves every byte once, within its limits, and comes to an end."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from lohan import _native

READ, WRITE, FLUSH = 0, 1, 2

requests = st.lists(
    st.tuples(st.sampled_from([READ, READ, WRITE, WRITE, FLUSH]), st.integers(0, 3),
              st.integers(1, 40)),
    max_size=25,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(
    pushed=requests,
    max_requests=st.integers(1, 5),
    max_bytes=st.integers(1, 30),
    block_bytes=st.integers(1, 9),
    is_simplex=st.booleans(),
    fairness_bytes=st.integers(1, 50),
    seed=st.integers(0, 2**32),
)
def test_every_byte_is_served_once_within_the_limits(
    pushed: list[tuple[int, int, int]],
    max_requests: int,
    max_bytes: int,
    block_bytes: int,
    is_simplex: bool,
    fairness_bytes: int,
    seed: int,
) -> None:
    queue = _native.DriveQueue(
        max_requests=max_requests,
        max_bytes=max_bytes,
        block_bytes=block_bytes,
        is_simplex=is_simplex,
        fairness_bytes=fairness_bytes,
    )
    choose = random.Random(seed)
    waiting = list(enumerate(pushed, start=1))
    sizes = {n: 0 if operation == FLUSH else nbytes for n, (operation, _, nbytes) in waiting}
    served: dict[int, list[tuple[int, int]]] = {n: [] for n in sizes}
    finished_bytes = dict.fromkeys(sizes, 0)
    in_flight: list[tuple[int, int, int, int]] = []
    while waiting or in_flight or not queue.is_idle:
        moves = ["take"] + ["push"] * bool(waiting) + ["finish"] * bool(in_flight)
        move = choose.choice(moves)
        if move == "push":
            number, (operation, priority, _) = waiting.pop(0)
            queue.push(number, operation, priority, sizes[number])
        elif move == "finish":
            block = in_flight.pop(choose.randrange(len(in_flight)))
            queue.finished(block)
            finished_bytes[block[0]] += block[3]
        else:
            taken = queue.next()
            if taken is None:
                # Never stuck: with nothing in flight there is always something to do.
                assert in_flight or queue.is_idle
                continue
            number, operation, start, nbytes = taken
            if operation == FLUSH:
                earlier = [n for n in range(1, number) if pushed[n - 1][0] == WRITE]
                assert all(finished_bytes[n] == sizes[n] for n in earlier)
            elif is_simplex:
                assert {block[1] for block in in_flight} <= {operation, FLUSH}
            assert nbytes <= block_bytes
            in_flight.append(taken)
            served[number].append((start, nbytes))
            assert len(in_flight) == queue.num_in_flight <= max_requests
            total = sum(block[3] for block in in_flight)
            assert total == queue.bytes_in_flight
            moving = [block for block in in_flight if block[3]]
            assert total <= max_bytes or len(moving) == 1
    for number, blocks in served.items():
        position = 0
        for start, nbytes in blocks:
            assert start == position
            position += nbytes
        assert position == sizes[number]
        assert blocks
