import subprocess
import sys

import pytest

from lohan.errors import ConfigError
from lohan.model import ModelShape, known_names, shape_of
from lohan.model.names import canonical_name
from lohan.model.public_models import ALIASES, PAPER_GPTS


@pytest.mark.parametrize("name", known_names())
def test_every_known_name_has_a_shape(name):
    shape = shape_of(name)
    assert shape.name == name
    assert shape.dtype_bytes == 2
    first, *blocks, last = [kind.name for kind in shape.kinds]
    assert (first, last) == ("embedding", "head")
    # Layers with windows and without are of two kinds, and so are those of two streams and of one.
    of_two_kinds = {"gemma-3-1b", "gpt-oss-20b", "gpt-oss-120b", "flux-12b"}
    assert len(blocks) == (2 if name in of_two_kinds else 1)
    assert all("block" in block for block in blocks)
    assert shape.nominal_parameters is not None
    assert 0.8 < shape.num_parameters / shape.nominal_parameters < 1.25


def test_the_papers_metric_counts_the_figure_in_the_name():
    assert shape_of("gpt-70b").nominal_parameters == 70e9
    assert shape_of("gpt-65b").nominal_parameters == 65e9
    assert shape_of("gpt-65b").kinds == shape_of("gpt-70b").kinds


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("GPT-13B", "gpt-13b"),
        ("Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3.1-70B", "llama-3.1-70b"),
        ("Qwen/Qwen3-14B", "qwen3-14b"),
        ("Qwen3-32B-Base", "qwen3-32b"),
        ("Mistral-Large-Instruct-2407", "mistral-large"),
        ("openai-community/gpt2-xl", "gpt2-xl"),
        ("GPT-2", "gpt2"),
        ("HuggingFaceTB/SmolLM2-135M", "smollm2-135m"),
        ("DiT-0.9B", "dit-0.90b"),
        ("llama-3.1-9b", None),
        ("./gpt-13b", None),
        ("/models/gpt2", None),
    ],
)
def test_names_are_read_as_people_write_them(text, name):
    assert canonical_name(text) == name


def test_every_alias_leads_to_a_known_name():
    assert set(ALIASES.values()) <= set(known_names())


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("gpt-13", "gpt-13b"),
        ("llama3.1-8b", "llama-3.1-8b"),
        ("lama-3.1-70b", "llama-3.1-70b"),
        ("dit-10", "dit-10b"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_ones(text, hint):
    with pytest.raises(ConfigError, match=f"no model is called '{text}'") as raised:
        shape_of(text)
    assert "did you mean" in raised.value.remedy
    assert hint in raised.value.remedy.partition("?")[0]


@pytest.mark.parametrize("text", ["zzz", "", "no/such/folder", "missing.json"])
def test_what_resembles_nothing_lists_the_known_names(text):
    with pytest.raises(ConfigError) as raised:
        shape_of(text)
    assert "gpt-175b" in raised.value.remedy


def test_longer_sequences_add_positions_to_the_papers_models():
    short, long = shape_of("gpt-6b", sequence=512), shape_of("gpt-6b", sequence=4096)
    assert short == shape_of("gpt-6b")
    extra = (4096 - 1024) * PAPER_GPTS["gpt-6b"].hidden
    assert long.num_parameters == short.num_parameters + extra
    assert long.kinds[1:] == short.kinds[1:]
    assert long.kinds[0].operators == short.kinds[0].operators


@pytest.mark.slow
def test_longer_positions_are_what_tracing_such_a_model_gives():
    import torch

    from lohan.model.paper_models import Gpt
    from support.traced import traced_shape

    with torch.device("meta"):
        model = Gpt(num_layers=28, num_heads=32, hidden=4096, longest_sequence=4096)
    assert traced_shape(model).kinds == shape_of("gpt-6b", sequence=4096).kinds


def test_a_sequence_beyond_learned_positions_is_refused():
    with pytest.raises(ConfigError, match="gpt2 cannot take sequences of 2048 tokens: it has 1024"):
        shape_of("gpt2", sequence=2048)
    assert shape_of("gpt2", sequence=1024) == shape_of("gpt2")
    assert shape_of("llama-3.1-8b", sequence=200_000) == shape_of("llama-3.1-8b")


def test_a_diffusion_models_number_of_tokens_is_its_own():
    with pytest.raises(ConfigError, match="works on 1024 tokens per sample, not 2048"):
        shape_of("dit-10b", sequence=2048)
    assert shape_of("dit-10b", sequence=1024).tokens_per_sample == 1024


@pytest.mark.parametrize("sequence", [0, -1])
def test_a_sequence_below_one_is_refused(sequence):
    with pytest.raises(ConfigError, match=f"a sequence of {sequence} tokens"):
        shape_of("gpt-13b", sequence=sequence)


def test_a_known_name_needs_no_torch():
    code = "import sys; from lohan.model import shape_of; shape_of('gpt-175b', sequence=2048); "
    done = subprocess.run([sys.executable, "-c", f"{code}sys.exit('torch' in sys.modules)"])
    assert done.returncode == 0


def test_an_existing_file_in_the_way_does_not_hide_a_known_name(tmp_path, monkeypatch):
    (tmp_path / "gpt-13b").mkdir()
    monkeypatch.chdir(tmp_path)
    assert isinstance(shape_of("gpt-13b"), ModelShape)


@pytest.mark.parametrize(
    ("name", "active"),
    [("gpt-oss-20b", 3.6e9), ("gpt-oss-120b", 5.1e9), ("qwen3-30b-a3b", 3.3e9)],
)
def test_experts_all_travel_and_only_those_chosen_compute(name, active):
    shape = shape_of(name)
    per_token = sum(shape.kinds[k].forward_flops.per_token for k in shape.sequence_of_kinds)
    # Two FLOPs per active parameter; the published counts leave the embedding in.
    assert per_token / 2 == pytest.approx(active, rel=0.2)
    assert shape.num_parameters > 5 * active
