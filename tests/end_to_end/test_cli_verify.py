"""`lohan verify`: the verdict, its exit code, and what cannot be verified."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import lohan.verify
from lohan.verify import CaseResult, Difference, Verification, all_cases
from support.command_line import run_lohan

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def few_cases(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    """Run some of the cases only."""
    whole: Any = lohan.verify.verify_copy
    cases = [all_cases()[number] for number in numbers]
    monkeypatch.setattr(
        lohan.verify, "verify_copy", lambda copy, **given: whole(copy, **given | {"cases": cases})
    )


def test_micro_batches_and_losses_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    whole: Any = lohan.verify.verify_copy
    asked: list[Any] = []

    def first_of(copy: Any, **given: Any) -> Any:
        asked.extend(given["cases"])
        return whole(copy, **given | {"cases": asked[:1]})

    monkeypatch.setattr(lohan.verify, "verify_copy", first_of)
    ran = run_lohan("verify", "gpt2", "--steps", 1, "--micro-batches", 3, "--hidden-states")
    assert ran.exit_code == 0
    assert len(asked) == 10
    assert all(case.num_micro_batches == 3 and case.reads_states for case in asked)


def test_a_known_model_is_equal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    few_cases(monkeypatch, 0, 13)
    ran = run_lohan("verify", "gpt2", "--steps", 2, "--ssd", tmp_path)
    assert ran.exit_code == 0
    assert "GPT2LMHeadModel" in ran.stdout
    assert "n_layer 12 -> 3" in ran.stdout
    assert "EQUAL: losses, masters, m and v have the same bits in all 2 cases" in ran.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_ranks_are_compared_with_as_many_groups(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole: Any = lohan.verify.verify_copy
    monkeypatch.setattr(
        lohan.verify,
        "verify_copy",
        lambda copy, **given: whole(copy, **given | {"cases": given["cases"][:1]}),
    )
    ran = run_lohan("verify", "gpt2", "--ranks", 2, "--steps", 2, "--ssd", tmp_path)
    assert ran.exit_code == 0, ran.stdout
    assert "EQUAL: losses, masters, m and v have the same bits in all 1 cases" in ran.stdout
    assert list(tmp_path.iterdir()) == []
    odd = run_lohan("verify", "gpt2", "--ranks", 2, "--micro-batches", 3, "--ssd", tmp_path)
    assert odd.exit_code == 2


def test_json_is_one_object_with_every_case(monkeypatch: pytest.MonkeyPatch) -> None:
    few_cases(monkeypatch, 3)
    fields = run_lohan("verify", "gpt2", "--steps", 1, "--json").fields
    assert fields["is_equal"] is True
    assert fields["tolerance"] is None
    (case,) = fields["cases"]
    assert case["activations"] == "swapped to SSD"
    assert case["difference"] is None


def test_a_difference_is_exit_code_1_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def different(copy: Any, **given: Any) -> Verification:
        found = Difference(
            step=2, what="m of wte.weight", expected=1.0, found=2.0, num_elements=9, num_more=4
        )
        case = CaseResult(
            case=all_cases()[0], difference=found, seconds=1.0, read_bytes=1, written_bytes=1
        )
        return Verification(
            copy=copy,
            device="cpu",
            reason="asked for",
            ram_bytes=1 << 20,
            state_bytes=1 << 20,
            num_steps=5,
            tolerance=None,
            cases=(case,),
        )

    monkeypatch.setattr(lohan.verify, "verify_copy", different)
    ran = run_lohan("verify", "gpt2")
    assert ran.exit_code == 1
    assert "DIFFERENT in 1 of 1 cases" in ran.stdout
    assert "step 2: m of wte.weight is 2.0 offloaded and 1.0 in memory" in ran.stdout
    fields = run_lohan("verify", "gpt2", "--json").fields
    assert fields["cases"][0]["difference"]["what"] == "m of wte.weight"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nonsense"], "there is no model 'nonsense'"),
        (["gpt2", "--ram", "64"], "has no unit"),
        (["gpt2", "--ssd", "/nowhere/at/all"], "cannot be used"),
        (["gpt2", "--device", "tpu"], "not a device"),
        (["gpt2", "--ram", "1MiB"], "RAM"),
    ],
)
def test_what_cannot_be_done_is_exit_code_2(words: list[str], said: str) -> None:
    ran = run_lohan("verify", *words)
    assert ran.exit_code == 2
    assert said in ran.stderr


def test_a_configuration_that_is_none_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for text, said in (("[]", "no JSON object"), ("{", "as JSON"), ("{}", "neither a model_type")):
        file.write_text(text)
        ran = run_lohan("verify", tmp_path)
        assert ran.exit_code == 2
        assert said in ran.stderr
    file.unlink()
    assert "holds no model configuration" in run_lohan("verify", tmp_path).stderr


def test_an_architecture_that_cannot_be_scaled_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"_class_name": "UNet2DModel", "block_out_channels": [32, 64]})
    )
    ran = run_lohan("verify", tmp_path)
    assert ran.exit_code == 2
    assert "cannot be scaled down" in ran.stderr


def others_slowly(names: Iterable[str], fast: str, long: tuple[str, ...]) -> list[Any]:
    """All names as parameters, all but one of them marked as slow or long."""
    marks = {fast: ()} | dict.fromkeys(long, pytest.mark.long)
    return [pytest.param(name, marks=marks.get(name, pytest.mark.slow)) for name in names]


FAMILIES = {
    "llama": "LlamaForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "qwen3": "Qwen3ForCausalLM",
    "t5": "T5ForConditionalGeneration",
    "bart": "BartForConditionalGeneration",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "bert": "BertForMaskedLM",
}
IMAGE_MODELS: dict[str, dict[str, Any]] = {
    "DiTTransformer2DModel": {"sample_size": 32, "num_layers": 28},
    "PixArtTransformer2DModel": {"caption_channels": 4096, "cross_attention_dim": 1152},
    "SD3Transformer2DModel": {"num_attention_heads": 24, "caption_projection_dim": 1536},
    "FluxTransformer2DModel": {"num_layers": 19, "num_single_layers": 38},
}
# Tiny ones of these are compared to the bit by tests/equivalence: of the same class (TINY_MODELS),
# or of a class that runs as theirs does (test_engine_families, and the one that stays here).
COMPARED_ELSEWHERE = ("llama", "gpt2", "qwen3", "bart", "mixtral")
LIKE_FLUX_OR_DIT = ("PixArtTransformer2DModel", "SD3Transformer2DModel")


@pytest.mark.parametrize("family", others_slowly(FAMILIES, "qwen3_moe", COMPARED_ELSEWHERE))
def test_families_of_language_models_are_equal(
    family: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = transformers.AutoConfig.for_model(family)
    config.architectures = [FAMILIES[family]]
    config.save_pretrained(tmp_path)
    few_cases(monkeypatch, 8, 13)
    fields = run_lohan("verify", tmp_path, "--steps", 2, "--json").fields
    assert fields["architecture"] == FAMILIES[family]
    assert fields["is_equal"]


@pytest.mark.parametrize(
    "kind", others_slowly(IMAGE_MODELS, "DiTTransformer2DModel", LIKE_FLUX_OR_DIT)
)
def test_families_of_image_models_are_equal(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import diffusers

    model = getattr(diffusers, kind)
    with torch.device("meta"):
        model(**IMAGE_MODELS[kind]).save_config(tmp_path)
    few_cases(monkeypatch, 8, 13)
    fields = run_lohan("verify", tmp_path, "--steps", 2, "--json").fields
    assert fields["architecture"] == kind
    assert fields["is_equal"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("llama-3.1-8b", ["--steps", 3]),
        pytest.param("llama-3.1-8b", [], marks=pytest.mark.long),
        pytest.param("dit-10b", [], marks=pytest.mark.long),
    ],
)
def test_all_cases_are_equal(model: str, words: list[object]) -> None:
    fields = run_lohan("verify", model, *words, "--json").fields
    assert fields["is_equal"]
    assert len(fields["cases"]) == 20
