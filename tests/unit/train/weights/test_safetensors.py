"""The file format, judged by the safetensors package, and every way a file can be damaged."""

import json
import os
import pathlib
import struct
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from lohan.errors import Corrupt, ShortTransfer, StorageError
from lohan.train.weights.safetensors_files import (
    ShardWriter,
    StoredTensor,
    is_equal,
    read_header,
    read_pieces,
    read_tensor,
)
from support.model_directories import change_header

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def some(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * 20
    return values > 0 if dtype is torch.bool else values.to(dtype)


@pytest.fixture
def file(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "model.safetensors"
    save_file({"a": some(torch.bfloat16, (7, 3)), "b": some(torch.float32, (5,), 1)}, path)
    return path


def test_what_the_package_writes_is_read(tmp_path: pathlib.Path) -> None:
    tensors = {
        f"t{n}": some(dtype, shape, n) for n, dtype in enumerate(DTYPES) for shape in [(3, n + 1)]
    } | {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4)}
    save_file(tensors, tmp_path / "x.safetensors")
    header = read_header(tmp_path / "x.safetensors")
    assert {stored.name for stored in header} == tensors.keys()
    for stored in header:
        found = read_tensor(stored)
        assert found.dtype is tensors[stored.name].dtype
        assert torch.equal(found, tensors[stored.name])
        pieces = list(torch.cat([p.clone() for p in read_pieces(stored, 8)] or [found]).view(-1))
        assert pieces == list(tensors[stored.name].view(-1))


@settings(deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(1, 5), max_size=3).map(tuple)),
        min_size=1,
        max_size=8,
    ),
    order=st.randoms(use_true_random=False),
)
def test_what_is_written_in_any_order_the_package_reads(shapes: Any, order: Any) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / "x.safetensors"
        tensors = {f"n{n}": some(dtype, shape, n) for n, (dtype, shape) in enumerate(shapes)}
        writer = ShardWriter(
            path, [(name, one.dtype, tuple(one.shape)) for name, one in tensors.items()]
        )
        places = list(writer.places)
        order.shuffle(places)
        for place in places:
            assert place.offset_bytes % place.dtype.itemsize == 0
            writer.write(place, tensors[place.name])
        writer.finish()
        assert path.stat().st_size == writer.nbytes
        found = load_file(path)
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert found[name].dtype is tensor.dtype
            assert torch.equal(found[name], tensor)


def test_a_tensor_larger_than_a_piece_is_written_whole(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lohan.train.weights.safetensors_files.PIECE_BYTES", 40)
    tensor = torch.randn(7, 13).t()  # neither contiguous nor a multiple of a piece
    writer = ShardWriter(tmp_path / "x.safetensors", [("t", torch.bfloat16, (13, 7))])
    writer.write(writer.places[0], tensor)
    writer.finish()
    assert torch.equal(load_file(tmp_path / "x.safetensors")["t"], tensor.bfloat16())


def test_stored_tensors_are_compared_by_value(tmp_path: pathlib.Path) -> None:
    one = some(torch.float32, (9, 9))
    other = one.clone()
    other[8, 8] += 1
    save_file({"a": one, "b": one.clone(), "c": other, "d": one.t().contiguous()}, tmp_path / "x")
    a, b, c, d = sorted(read_header(tmp_path / "x"), key=lambda stored: stored.name)
    assert is_equal(a, b)
    assert not is_equal(a, c)
    assert not is_equal(a, d)


@pytest.mark.parametrize(("cut_bytes", "name"), [(1, "a"), (42, "a"), (43, "b"), (62, "b")])
def test_a_truncated_file_names_the_first_tensor_that_is_cut(
    cut_bytes: int, name: str, file: pathlib.Path
) -> None:
    os.truncate(file, file.stat().st_size - cut_bytes)
    with pytest.raises(ShortTransfer, match=rf"ends within the tensor {name}.*model\.safetensors"):
        read_header(file)


@pytest.mark.parametrize("left_bytes", [0, 5, 8, 30])
def test_a_file_cut_within_its_header_is_named(left_bytes: int, file: pathlib.Path) -> None:
    os.truncate(file, left_bytes)
    with pytest.raises(ShortTransfer, match=r"ends within its .*model\.safetensors"):
        read_header(file)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "F4"}, "the number type 'F4' is not known"),
        ({"shape": [3, 3]}, "are not its shape"),
        ({"shape": [-1, 5]}, "negative or not whole"),
        ({"shape": 5}, "tensor "),
        ({"data_offsets": [0]}, "tensor "),
        ({"data_offsets": [4, 24]}, "do not begin at"),
        ({"data_offsets": [0, 2**70]}, "are not its shape"),
        ({"data_offsets": [True, 20]}, "negative or not whole"),
    ],
)
def test_a_damaged_entry_is_refused(
    changes: dict[str, Any], words: str, file: pathlib.Path
) -> None:
    change_header(file, **changes)
    with pytest.raises(Corrupt, match=words) as caught:
        read_header(file)
    assert caught.value.path == str(file)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (struct.pack("<Q", 2**63) + b"{}", "announces a header of"),
        (struct.pack("<Q", 4) + b"\xff\xfe{}", "damaged header"),
        (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
        (struct.pack("<Q", 2) + b"{}" + b"rest", "4 bytes behind the last tensor"),
        (struct.pack("<Q", 8) + b'{"a": 1}', "tensor a"),
        (b"version https://git-lfs.github.com/spec/v1\n" * 3, "announces a header"),
    ],
)
def test_what_is_no_header_is_refused(content: bytes, words: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(Corrupt, match=words):
        read_header(tmp_path / "x.safetensors")


def test_a_header_nested_too_deep_is_refused(tmp_path: pathlib.Path) -> None:
    text = b"[" * 100_000
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(Corrupt):
        read_header(tmp_path / "x.safetensors")


def test_a_file_that_cannot_be_read_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(StorageError, match=r"cannot be read.*none"):
        read_header(tmp_path / "none")
    stored = StoredTensor(
        name="a", dtype=torch.int8, shape=(3,), path=tmp_path / "none", offset_bytes=0
    )
    with pytest.raises(StorageError, match=r"cannot be opened.*none"):
        read_tensor(stored)


def test_a_file_that_shrinks_after_the_check_is_named(file: pathlib.Path) -> None:
    stored = read_header(file)[-1]
    os.truncate(file, file.stat().st_size - 3)
    with pytest.raises(ShortTransfer, match=f"ends within the tensor {stored.name}"):
        read_tensor(stored)


def test_a_failing_read_names_the_tensor(
    file: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> int:
        raise OSError(5, "Input/output error")

    stored = read_header(file)[0]
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(StorageError, match=f"the tensor {stored.name} cannot be read"):
        read_tensor(stored)


def test_short_reads_and_writes_are_continued(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_read, real_write = os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: real_read(fd, [views[0][:5]], at))
    monkeypatch.setattr(os, "pwrite", lambda fd, view, at: real_write(fd, view[:7], at))
    tensor = some(torch.float32, (5, 5))
    writer = ShardWriter(tmp_path / "x.safetensors", [("t", torch.float32, (5, 5))])
    writer.write(writer.places[0], tensor)
    writer.finish()
    assert torch.equal(read_tensor(read_header(tmp_path / "x.safetensors")[0]), tensor)


def test_a_writer_never_writes_over_a_file(file: pathlib.Path) -> None:
    before = file.read_bytes()
    with pytest.raises(StorageError, match="cannot be made"):
        ShardWriter(file, [("t", torch.float32, (5, 5))])
    assert file.read_bytes() == before


def test_the_header_is_json_with_the_format_s_mark(tmp_path: pathlib.Path) -> None:
    ShardWriter(tmp_path / "x.safetensors", [("t", torch.float32, (5,))]).finish()
    content = (tmp_path / "x.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    assert length % 8 == 0
    assert json.loads(content[8 : 8 + length])["__metadata__"] == {"format": "pt"}
