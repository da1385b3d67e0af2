"""Layouts, allocators and checksum tables against slow judges that keep every page apart."""

import itertools
import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lohan import _native
from lohan.errors import OutOfSpace
from lohan.ssd import ChecksumTable, Extent, ExtentAllocator, Stretch, StripeLayout
from lohan.ssd.layout import deal_chunks

PAGE = 4096
weights_lists = st.lists(st.floats(0.05, 20), min_size=1, max_size=6)


@settings(max_examples=100, deadline=None)
@given(
    weights=weights_lists,
    num_chunks=st.integers(1, 200),
    chunk_pages=st.integers(1, 4),
    choices=st.data(),
)
def test_pieces_tile_the_range_and_no_two_bytes_share_a_place(
    weights: list[float], num_chunks: int, chunk_pages: int, choices: st.DataObject
) -> None:
    chunk = chunk_pages * PAGE
    layout = StripeLayout.plan(
        capacity_bytes=num_chunks * chunk, weights=weights, chunk_bytes=chunk
    )
    # Judge: deal the chunks out one by one and remember where each landed.
    next_free = [0] * len(weights)
    places = []
    for number in range(num_chunks):
        drive = layout.pattern[number % len(layout.pattern)]
        places.append((drive, next_free[drive]))
        next_free[drive] += chunk
    assert [layout.file_bytes(drive) for drive in range(len(weights))] == next_free
    num_pages = num_chunks * chunk_pages
    first = choices.draw(st.integers(0, num_pages - 1))
    count = choices.draw(st.integers(1, num_pages - first))
    pieces = list(layout.pieces(first * PAGE, count * PAGE))
    position = 0
    for piece in pieces:
        assert piece.start_bytes == position
        for page in range(0, piece.nbytes, PAGE):
            number, inside = divmod(first * PAGE + position + page, chunk)
            drive, offset = places[number]
            assert (piece.drive, piece.offset_bytes + page) == (drive, offset + inside)
        position += piece.nbytes
    assert position == count * PAGE
    assert all(a.drive != b.drive for a, b in itertools.pairwise(pieces))
    assert StripeLayout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


@settings(max_examples=60, deadline=None)
@given(weights=weights_lists)
def test_drives_are_done_together_and_never_wait_long_for_their_turn(weights: list[float]) -> None:
    pattern = deal_chunks(weights)
    assert pattern == deal_chunks(weights)
    total = sum(weights)
    slowest = max(pattern.count(d) / len(pattern) * total / w for d, w in enumerate(weights))
    assert slowest <= 1 + len(weights) / 32
    for drive in set(pattern):
        share = pattern.count(drive) / len(pattern)
        for length in range(1, len(pattern) + 1):
            got = pattern[:length].count(drive)
            assert abs(got - share * length) < len(weights)


@settings(max_examples=100, deadline=None)
@given(choices=st.data(), num_pages=st.integers(1, 60))
def test_allocator_never_gives_a_page_twice_and_finds_what_fits(
    choices: st.DataObject, num_pages: int
) -> None:
    allocator = ExtentAllocator(num_pages * PAGE)
    owner: list[int | None] = [None] * num_pages
    extents: dict[int, Extent] = {}
    for number in range(40):
        if extents and choices.draw(st.booleans()):
            name = choices.draw(st.sampled_from(sorted(extents)))
            extent = extents.pop(name)
            allocator.free(extent)
            owner = [None if who == name else who for who in owner]
        else:
            nbytes = choices.draw(st.integers(1, 12 * PAGE))
            pages = -(-nbytes // PAGE)
            runs = "".join("." if who is None else "#" for who in owner).split("#")
            fits = any(len(run) >= pages for run in runs)
            try:
                extent = allocator.allocate(nbytes)
            except OutOfSpace:
                assert not fits
                continue
            assert fits
            assert extent.nbytes == pages * PAGE
            first = extent.offset_bytes // PAGE
            assert owner[first : first + pages] == [None] * pages
            owner[first : first + pages] = [number] * pages
            extents[number] = extent
        assert allocator.free_bytes == owner.count(None) * PAGE
        longest = max(len(run) for run in
                      "".join("." if who is None else "#" for who in owner).split("#"))  # fmt: skip
        assert allocator.largest_free_bytes == longest * PAGE
    again = ExtentAllocator(num_pages * PAGE, taken=allocator.extents)
    assert again.extents == allocator.extents
    assert again.largest_free_bytes == allocator.largest_free_bytes


def bytewise_crc32c(text: bytes) -> int:
    """The definition, one bit at a time (RFC 3720, B.4)."""
    value = 0xFFFFFFFF
    for byte in text:
        value ^= byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


@settings(max_examples=100, deadline=None)
@given(text=st.binary(max_size=2000), cut=st.integers(0, 2000), shift=st.integers(0, 15))
def test_checksums_equal_the_definition_on_every_path(text: bytes, cut: int, shift: int) -> None:
    memory = np.frombuffer(bytes(shift) + text, dtype=np.uint8)
    address = memory.ctypes.data + shift
    expected = bytewise_crc32c(text)
    assert _native.crc32c(0, address, len(text)) == expected
    assert _native.crc32c_portable(0, address, len(text)) == expected
    cut = min(cut, len(text))
    first, second = bytewise_crc32c(text[:cut]), bytewise_crc32c(text[cut:])
    assert _native.crc32c(first, address + cut, len(text) - cut) == expected
    assert _native.crc32c_join(first, second, len(text) - cut) == expected


@settings(max_examples=100, deadline=None)
@given(
    writes=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12), st.booleans()), max_size=15),
    first=st.integers(0, 30),
    count=st.integers(1, 12),
)
def test_a_checksum_is_known_only_while_all_its_bytes_are_those_written(
    writes: list[tuple[int, int, bool]], first: int, count: int
) -> None:
    table = ChecksumTable()
    # Judge: per byte, the write it came from, if that write is still whole.
    live: dict[int, tuple[int, int]] = {}
    for number, (offset, nbytes, is_forgotten) in enumerate(writes):
        for name, (start, length) in list(live.items()):
            if start < offset + nbytes and offset < start + length:
                del live[name]
        if is_forgotten:
            table.forget(offset, nbytes)
        else:
            table.record(Stretch(offset_bytes=offset, nbytes=nbytes, checksum=number))
            live[number] = (offset, nbytes)
    expected = sorted((s, n, name) for name, (s, n) in live.items())
    assert [(s.offset_bytes, s.nbytes, s.checksum) for s in table.stretches()] == expected
    inside = [entry for entry in expected if entry[0] >= first and sum(entry[:2]) <= first + count]
    found = table.inside(first, count)
    assert [(s.offset_bytes, s.nbytes, s.checksum) for s in found] == inside
    assert table.covers(first, count) == (sum(entry[1] for entry in inside) == count)
