"""The files under src/lohan/model/shapes against tracing anew.

Another version of torch or transformers may dispatch other operators for the same model: the files
are of the tested versions, and compared only there.
"""

from importlib import metadata, resources

import pytest

from lohan.model import known_names
from lohan.model.configs import trace_known

TESTED = {"torch": "2.13", "transformers": "5.22"}
SHAPES = resources.files("lohan.model") / "shapes"

others = [name for name, tested in TESTED.items() if not metadata.version(name).startswith(tested)]
pytestmark = pytest.mark.skipif(bool(others), reason=f"shapes are of other versions of {others}")


def test_there_is_a_file_for_every_known_name_and_no_other():
    files = {entry.name for entry in SHAPES.iterdir() if entry.name.endswith(".json")}
    assert files == {f"{name}.json" for name in known_names()}


def retraced_equals_shipped(name):
    return trace_known(name).to_json() == (SHAPES / f"{name}.json").read_text(encoding="utf-8")


def test_the_papers_headline_model_is_what_tracing_gives():
    assert retraced_equals_shipped("gpt-175b")


FAMILIES = {name.split("-")[0]: name for name in reversed(known_names())}
# Traced by the code that traces another: of a language model, of a denoiser of two streams.
LIKE_ANOTHER = {"mistral": "llama", "qwen3": "llama", "gpt": "gpt2", "qwen": "flux"}


def test_what_is_left_out_has_another_of_its_kind():
    for left_out, other in LIKE_ANOTHER.items():
        assert left_out in FAMILIES
        assert other in FAMILIES.keys() - LIKE_ANOTHER.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for family, name in FAMILIES.items() if family not in LIKE_ANOTHER]
)
def test_a_file_of_each_family_is_what_tracing_gives(name):
    assert retraced_equals_shipped(name)


@pytest.mark.long
@pytest.mark.parametrize("name", known_names())
def test_every_file_is_what_tracing_gives(name):
    assert retraced_equals_shipped(name)
