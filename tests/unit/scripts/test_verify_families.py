"""scripts/verify_families: small models are whole, and each outcome is told from the others."""

from pathlib import Path

import pytest
import torch

from lohan.verify.plain_loop import losses_and_gradients
from support.sweep import judged
from support.sweep.catalogue import SHORT_LIST, Family, all_families
from support.sweep.small_configs import small_config

pytestmark = pytest.mark.filterwarnings("ignore")  # of models' own code


def test_the_short_list_is_known() -> None:
    assert set(SHORT_LIST) <= set(all_families())


@pytest.mark.parametrize(
    "name", ["causal/llama", "vision/vit", "pictures/llava", "diffusion/DiTTransformer2DModel"]
)
def test_a_small_model_has_a_gradient_in_every_part(name: str) -> None:
    family = all_families()[name]
    model = judged.build(family, has_dropout=True)
    assert sum(p.numel() for p in model.parameters()) < 300_000
    row = judged.Row(name=name, kind=family.kind, class_name="", outcome=judged.NOT_BUILT)
    copy = judged.trainable_copy(family, row)
    assert copy is not None
    _, gradients = losses_and_gradients(
        copy.in_memory(torch.device("cpu")), [copy.make_batch(0)], copy.loss_fn
    )
    blocks = {part for name in gradients if gradients[name].any() for part in name.split(".")}
    assert {"0", "1"} <= blocks
    first, other = copy.make_batch(0), copy.make_batch(1)
    assert any(
        not torch.equal(first[key], other[key])
        for key in first
        if isinstance(first[key], torch.Tensor)
    )


def test_dropout_is_on_where_a_configuration_has_it() -> None:
    import transformers

    config = small_config(transformers.LlamaConfig, has_dropout=True)
    assert config.attention_dropout > 0
    assert config.hidden_size <= 64


def test_an_architecture_is_judged_equal(tmp_path: Path) -> None:
    row = judged.judge(all_families()["causal/llama"], tmp_path)
    assert (row.outcome, row.reason) == (judged.EQUAL, "")
    assert row.num_with_gradient == row.num_tensors


def test_what_cannot_be_built_says_why(tmp_path: Path) -> None:
    unknown = Family(kind="causal", model_type="none", class_name="NoSuchModel")
    row = judged.judge(unknown, tmp_path)
    assert row.outcome == judged.NOT_BUILT
    assert "NoSuchModel" in row.reason
