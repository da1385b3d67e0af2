"""Copies of the states in a checkpoint folder."""

import json
import pathlib

import pytest
import torch

from lohan.engine.model_buffers import ModelBuffers, changed_buffers
from lohan.errors import Corrupt
from lohan.train.weights.archive import check_states, read_copy, write_states


class NormOnly:
    """As much of an engine as a copy needs: one weight, and statistics that changed."""

    def __init__(self) -> None:
        self.model = torch.nn.BatchNorm1d(4)
        self._buffers = ModelBuffers(self.model)
        self.model(torch.arange(8.0).view(2, 4))
        self.buffers = self._buffers.to_json()
        self.counters = {"num_steps": 1}

    def weights(self, *, are_frozen_wanted: bool) -> list[tuple[str, torch.Tensor]]:
        return [("weight", torch.ones(4))]

    def moments(self) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        return [("weight", torch.zeros(4), torch.zeros(4))]


def test_running_statistics_come_back_from_a_copy(tmp_path: pathlib.Path) -> None:
    engine = NormOnly()
    write_states(engine, {"weight": (4,)}, tmp_path / "states")
    check_states(tmp_path / "states")
    found = read_copy(tmp_path / "states").buffers
    other = torch.nn.BatchNorm1d(4)
    ModelBuffers(other, found)
    for name, buffer in engine.model.named_buffers():
        assert torch.equal(other.get_buffer(name), buffer), name
    assert changed_buffers(found).keys() == dict(other.named_buffers()).keys()


def test_damaged_buffers_of_a_copy_are_found(tmp_path: pathlib.Path) -> None:
    write_states(NormOnly(), {"weight": (4,)}, tmp_path / "states")
    path = tmp_path / "states" / "buffers.json"
    path.write_text(path.read_text().replace("running_mean", "running_meat"))
    with pytest.raises(Corrupt, match=r"buffers\.json is damaged"):
        check_states(tmp_path / "states")


def test_a_copy_of_an_older_release_has_no_buffers(tmp_path: pathlib.Path) -> None:
    write_states(NormOnly(), {"weight": (4,)}, tmp_path / "states")
    index = json.loads((tmp_path / "states" / "index.json").read_text())
    del index["files"]["buffers.json"]
    (tmp_path / "states" / "index.json").write_text(json.dumps(index))
    assert read_copy(tmp_path / "states").buffers == {}
