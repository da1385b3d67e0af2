"""The order of blocks, without a drive."""

from lohan import _native

READ, WRITE, FLUSH = 0, 1, 2


def make_queue(
    *,
    max_requests: int = 100,
    max_bytes: int = 10**9,
    block_bytes: int = 4,
    is_simplex: bool = False,
    fairness_bytes: int = 10**9,
) -> _native.DriveQueue:
    return _native.DriveQueue(
        max_requests=max_requests,
        max_bytes=max_bytes,
        block_bytes=block_bytes,
        is_simplex=is_simplex,
        fairness_bytes=fairness_bytes,
    )


def take_all(queue: _native.DriveQueue) -> list[tuple[int, int, int, int]]:
    """Serve the queue one block at a time."""
    served = []
    while (block := queue.next()) is not None:
        served.append(block)
        queue.finished(block)
    return served


def test_requests_are_cut_into_blocks_with_a_short_last_one() -> None:
    queue = make_queue()
    queue.push(1, READ, 0, 10)
    assert take_all(queue) == [(1, READ, 0, 4), (1, READ, 4, 4), (1, READ, 8, 2)]
    assert queue.is_idle


def test_what_compute_waits_for_goes_first_even_in_front_of_a_started_request() -> None:
    queue = make_queue()
    queue.push(1, READ, 3, 8)
    first = queue.next()
    assert first == (1, READ, 0, 4)
    queue.push(2, READ, 1, 4)
    queue.push(3, WRITE, 0, 4)
    assert [block[0] for block in take_all(queue)] == [3, 2, 1]


def test_one_priority_is_served_in_order_of_arrival_in_both_directions() -> None:
    queue = make_queue()
    for number, operation in enumerate((READ, WRITE, READ, WRITE, WRITE), start=1):
        queue.push(number, operation, 1, 4)
    assert [block[0] for block in take_all(queue)] == [1, 2, 3, 4, 5]


def test_no_more_blocks_than_allowed_are_in_flight() -> None:
    queue = make_queue(max_requests=2)
    queue.push(1, READ, 0, 12)
    first, second = queue.next(), queue.next()
    assert first is not None
    assert second is not None
    assert queue.next() is None
    assert queue.num_in_flight == 2
    queue.finished(first)
    assert queue.next() == (1, READ, 8, 4)


def test_no_more_bytes_than_allowed_are_in_flight_but_one_block_always_passes() -> None:
    queue = make_queue(max_bytes=6, block_bytes=4)
    queue.push(1, READ, 0, 10)
    first = queue.next()
    assert first is not None
    assert queue.next() is None
    assert queue.bytes_in_flight == 4
    wide = make_queue(max_bytes=1, block_bytes=4)
    wide.push(1, READ, 0, 8)
    assert wide.next() == (1, READ, 0, 4)
    assert wide.next() is None


def test_a_simplex_drive_gets_runs_of_one_direction() -> None:
    queue = make_queue(is_simplex=True)
    for number in range(1, 9):
        queue.push(number, READ if number % 2 else WRITE, 1, 4)
    assert [block[0] for block in take_all(queue)] == [1, 3, 5, 7, 2, 4, 6, 8]


def test_a_duplex_drive_gets_the_same_requests_mixed() -> None:
    queue = make_queue()
    for number in range(1, 9):
        queue.push(number, READ if number % 2 else WRITE, 1, 4)
    assert [block[0] for block in take_all(queue)] == list(range(1, 9))


def test_a_simplex_drive_never_has_both_directions_in_flight() -> None:
    queue = make_queue(is_simplex=True)
    queue.push(1, READ, 1, 4)
    queue.push(2, WRITE, 1, 4)
    read = queue.next()
    assert read == (1, READ, 0, 4)
    assert queue.next() is None
    queue.finished(read)
    assert queue.next() == (2, WRITE, 0, 4)


def test_a_higher_priority_turns_a_simplex_drive_around() -> None:
    queue = make_queue(is_simplex=True)
    queue.push(1, WRITE, 2, 8)
    first = queue.next()
    assert first == (1, WRITE, 0, 4)
    queue.push(2, READ, 0, 4)
    assert queue.next() is None
    queue.finished(first)
    assert [block[0] for block in take_all(queue)] == [2, 1]


def test_a_lower_priority_of_the_current_direction_does_not_hold_up_the_other() -> None:
    queue = make_queue(is_simplex=True)
    queue.push(1, READ, 3, 4)
    queue.push(2, WRITE, 1, 4)
    assert [block[0] for block in take_all(queue)] == [2, 1]


def test_fairness_gives_the_other_direction_its_turn() -> None:
    queue = make_queue(is_simplex=True, fairness_bytes=8)
    for number in range(1, 7):
        queue.push(number, READ, 1, 4)
    for number in range(7, 11):
        queue.push(number, WRITE, 1, 4)
    assert [block[0] for block in take_all(queue)] == [1, 2, 7, 8, 3, 4, 9, 10, 5, 6]


def test_fairness_does_not_serve_a_lower_priority_first() -> None:
    queue = make_queue(is_simplex=True, fairness_bytes=4)
    queue.push(1, READ, 0, 12)
    queue.push(2, WRITE, 2, 4)
    assert [block[0] for block in take_all(queue)] == [1, 1, 1, 2]


def test_a_flush_waits_for_the_writes_before_it_and_not_for_those_after_it() -> None:
    queue = make_queue()
    queue.push(1, WRITE, 3, 8)
    queue.push(2, FLUSH, 0, 0)
    queue.push(3, WRITE, 0, 4)
    late, first, second = queue.next(), queue.next(), queue.next()
    assert [block and block[0] for block in (late, first, second)] == [3, 1, 1]
    assert queue.next() is None
    assert first is not None
    assert second is not None
    queue.finished(second)
    assert queue.next() is None
    queue.finished(first)
    assert queue.next() == (2, FLUSH, 0, 0)
    assert late is not None
    queue.finished(late)
    queue.finished((2, FLUSH, 0, 0))
    assert queue.is_idle


def test_a_flush_does_not_wait_for_reads() -> None:
    queue = make_queue()
    queue.push(1, READ, 0, 4)
    queue.push(2, FLUSH, 0, 0)
    assert {queue.next(), queue.next()} == {(1, READ, 0, 4), (2, FLUSH, 0, 0)}


def test_a_dropped_request_gives_no_more_blocks_and_frees_a_flush() -> None:
    queue = make_queue()
    queue.push(1, WRITE, 0, 12)
    queue.push(2, FLUSH, 0, 0)
    first = queue.next()
    assert first is not None
    assert queue.drop(1) == 8
    assert queue.next() is None
    queue.finished(first)
    assert take_all(queue) == [(2, FLUSH, 0, 0)]
    assert queue.drop(7) == 0


def test_an_unknown_priority_counts_as_the_lowest() -> None:
    queue = make_queue()
    queue.push(1, READ, 99, 4)
    queue.push(2, READ, 3, 4)
    assert [block[0] for block in take_all(queue)] == [1, 2]
