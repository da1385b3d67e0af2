"""The reader on the page about the format reads what the store wrote."""

import contextlib
import pathlib
import re
import subprocess
import sys

import pytest
import torch

from lohan.ssd import IoEngine
from lohan.store import ComputeFormat, MasterFormat
from support.state_stores import (
    RUN_ID,
    STATE_FORMATS,
    created,
    make_directories,
    random_tensors,
    small_layout,
)

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "on-disk-format.md"


@pytest.mark.parametrize(("compute_format", "master_format"), STATE_FORMATS)
def test_the_reader_of_the_format_page_finds_every_master(
    tmp_path: pathlib.Path, compute_format: ComputeFormat, master_format: MasterFormat
) -> None:
    directories = make_directories(tmp_path, 3)
    layout = small_layout(compute_format, master_format)
    tensors = random_tensors(layout)
    ties = torch.tensor([0x3F808000, 0x3F818000, 0x40018000, 0x40008000], dtype=torch.int32)
    tensors["embed"].view(-1)[:4] = ties.view(torch.float32)
    with (
        contextlib.closing(IoEngine(is_uring=False)) as engine,
        created(directories, layout, engine) as store,
    ):
        store.fill(tensors.items())
        store.seal(step=0)
        masters = dict(store.masters())
    program = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    run_directories = [str(directory / f"lohan-{RUN_ID}") for directory in reversed(directories)]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *run_directories],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    assert list(found) == list(layout.names)
    for name, master in masters.items():
        expected = torch.linalg.vector_norm(master.double()).item()
        assert float(found[name]) == pytest.approx(expected, rel=1e-12)
