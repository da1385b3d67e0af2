"""The configuration file, overrides, origins, and what is said about wrong names."""

import pathlib
from typing import Any

import pytest
import yaml

from lohan.errors import ConfigError
from lohan.train.settings.arguments import make_arguments
from lohan.train.settings.config import (
    check_places,
    load_config,
    read_settings,
    written_settings,
)
from lohan.train.settings.offload import OffloadConfig, read_offload

FILE = """\
model: some/model
data: rows.jsonl
out: runs/one
learning_rate: 2e-5
offload:
  ssd: [/mnt/a, /mnt/b]
  ram: 48GiB
  write_budget: 300TB
  ssd_rated_tbw: [1200TB, 600TB]
"""


@pytest.fixture
def file(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "run.yaml"
    path.write_text(FILE)
    return path


def test_a_file_gives_values_of_the_right_type_and_their_origin(file: pathlib.Path) -> None:
    config = load_config(file)
    assert config.arguments["learning_rate"] == 2e-5
    assert config.offload.ssd == ("/mnt/a", "/mnt/b")
    assert config.offload.ram == 48 << 30
    assert config.offload.write_budget == 300 * 10**12
    assert config.offload.ssd_rated_bytes == (1200 * 10**12, 600 * 10**12)
    again = file.with_name("again.yaml")
    again.write_text(config.to_text())
    assert load_config(again).offload == config.offload
    assert config.settings["learning_rate"].origin == str(file)
    assert config.settings["max_length"].origin == "default"
    assert config.settings["logging_steps"].origin == "lohan default"


def test_the_command_line_wins_over_the_file(file: pathlib.Path) -> None:
    words = [
        ("learning_rate", "1e-4"),
        ("max_steps", "-1"),
        ("packing", "true"),
        ("lr_scheduler_kwargs", "{num_cycles: 2}"),
        ("offload.ram", "8GiB"),
        ("data", ["a.jsonl", "b.jsonl"]),
    ]
    config = load_config(file, words)
    assert config.arguments["learning_rate"] == 1e-4
    assert config.arguments["max_steps"] == -1
    assert config.arguments["packing"] is True
    assert config.arguments["lr_scheduler_kwargs"] == {"num_cycles": 2}
    assert config.offload.ram == 8 << 30
    assert config.data == ("a.jsonl", "b.jsonl")
    assert config.settings["learning_rate"].origin == "command line"


def test_the_saved_text_gives_the_same_arguments_again(
    file: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    config = load_config(file, [("lr_scheduler_type", "cosine"), ("seed", "7")])
    again = tmp_path / "again.yaml"
    again.write_text(config.to_text())
    assert make_arguments(load_config(again)).to_dict() == make_arguments(config).to_dict()
    assert load_config(again).offload == config.offload
    # A default that is written is a choice: of a column, where rows have several.
    assert load_config(again).arguments == config.arguments


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("learning_rat", '"learning_rate"'),
        ("max_seq_length", "write max_length"),
        ("base_model", "write model"),
        ("datasets", "write data"),
        ("micro_batch_size", "per_device_train_batch_size"),
        ("sequence_len", "max_length"),
        ("model_name_or_path", "write model"),
        ("cutoff_len", "max_length"),
        ("zero_optimization", "offload"),
        ("offload.nvme_path", "ssd"),
        ("offload.sdd", '"offload.ssd"'),
        ("warmup_ratio", "warmup_steps"),
        ("output_dir", "write out"),
        ("lora_rank", "write lora_r"),
        ("adapter", "write use_peft, lora_r"),
        ("load_in_4bit", "none is quantized"),
        ("zero_optimization.stage", "there are no stages"),
        ("qqqq", "docs/configuration.md"),
    ],
)
def test_an_unknown_key_is_refused_with_the_name_to_write(
    file: pathlib.Path, key: str, hint: str
) -> None:
    with pytest.raises(ConfigError, match=key) as refused:
        load_config(file, [(key, "1")])
    assert hint in refused.value.remedy


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: [", "not YAML"),
        ("- a\n- b\n", "holds no settings"),
        ("model: a\nmodel: b\n", "written twice"),
        ("offload: 5\n", "block of settings"),
        ("offload:\n  ssd: 7\n", "offload.ssd"),
        ("offload:\n  ssd: [/a, /a]\n", "twice"),
        ("offload:\n  ssd: /a\n  ram: lots\n", "offload.ram"),
        ("offload:\n  ssd: /a\n  ram: -5\n", "offload.ram"),
        ("offload:\n  ssd: /a\n  ram: 48\n", "offload.ram is 48, without a unit"),
        ("offload:\n  ssd: /a\n  write_budget: '300'\n", "without a unit"),
        ("offload:\n  ssd: /a\n  ssd_rated_tbw: 1200\n", "ssd_rated_tbw is 1200, without a unit"),
        ("offload:\n  ssd: /a\n  ssd_rated_tbw: [1TB, much]\n", "offload.ssd_rated_tbw"),
        ("offload:\n  ssd: /a\n  archive_steps: 0\n", "archive_steps"),
        ("offload:\n  ssd: /a\n  device: 5\n", "device is 5"),
        ("learning_rate: fast\noffload: {ssd: /a}\n", "learning_rate"),
        ("packing: sometimes\noffload: {ssd: /a}\n", "packing"),
        ("model: [a, b]\noffload: {ssd: /a}\n", "model"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(
    tmp_path: pathlib.Path, text: str, words: str
) -> None:
    path = tmp_path / "bad.yaml"
    missing = "".join(f"{key}: x\n" for key in ("model", "data", "out") if f"{key}:" not in text)
    path.write_text(text if text.startswith(("model: [\n", "- ")) else text + missing)
    with pytest.raises(ConfigError, match=words):
        load_config(path)


@pytest.mark.parametrize("key", ["model", "data", "out"])
def test_what_is_required_is_asked_for(key: str) -> None:
    given = {"model": "m", "data": "d", "out": "o", "offload.ssd": "/s"}
    with pytest.raises(ConfigError, match=f'"{key}" is missing'):
        load_config(None, [(name, value) for name, value in given.items() if name != key])


def test_without_an_ssd_directory_it_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="--ssd DIR"):
        load_config(None, [("model", "m"), ("data", "d"), ("out", "o")])


def test_a_file_that_is_not_there_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        load_config(tmp_path / "none.yaml")


def test_a_value_transformers_refuses_is_a_clear_error(file: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="cosin is not a valid SchedulerType"):
        make_arguments(load_config(file, [("lr_scheduler_type", "cosin")]))


@pytest.mark.parametrize(
    ("block", "word"),
    [({"ssd": "/a", "disk": 1}, "disk"), ({}, "--ssd"), ([1], "block of settings")],
)
def test_a_block_given_in_code_is_checked_too(block: Any, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        read_offload(block, where="offload")


def test_a_checked_block_is_taken_as_it_is() -> None:
    block = OffloadConfig(ssd=("/a",))
    assert read_offload(block, where="offload") is block


def test_the_hub_token_is_not_written(file: pathlib.Path) -> None:
    text = load_config(file, [("hub_token", "hf_secret")]).to_text()
    assert "hf_secret" not in text
    assert yaml.safe_load(text)["hub_token"] is None  # so that it can be used as a file again


def test_prompts_are_texts_conversations_or_lines_of_a_file(
    file: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    lines = tmp_path / "prompts.txt"
    lines.write_text("Who are you?\n\nWhere?\n")
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    with file.open("a") as open_file:
        open_file.write(yaml.safe_dump({"sample_prompts": ["How?", str(lines), talk]}))
    config = load_config(file)
    assert config.sample_prompts == ("How?", "Who are you?", "Where?", talk)
    assert load_config(file, [("sample_prompts", "Alone")]).sample_prompts == ("Alone",)
    assert load_config(file, [("sample_prompts", None)]).sample_prompts == ()
    for wrong in (3, ["How?", ""], [[{"role": "user"}]]):
        with pytest.raises(ConfigError, match="sample_prompts has"):
            load_config(file, [("sample_prompts", wrong)])
    lines.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"prompts\.txt cannot be read"):
        load_config(file)


def test_a_merged_block_gives_what_is_not_written_itself(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: m\ndata: d\nout: o\noffload:\n  <<: &usual {ssd: /a, ram: 1GiB}\n  ram: 2GiB\n"
    )
    written = written_settings(path)
    assert (written["offload.ssd"].value, written["offload.ram"].value) == ("/a", "2GiB")


@pytest.mark.parametrize("text", ["a: " + "[" * 5000 + "]" * 5000, "max_steps: " + "9" * 5000])
def test_yaml_that_no_program_should_choke_on_is_refused(tmp_path: pathlib.Path, text: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"run\.yaml is not YAML"):
        written_settings(path)


@pytest.mark.parametrize("key", ["model", "out", "offload.ssd"])
def test_a_path_that_is_not_utf8_is_refused(key: str) -> None:
    given = {"model": "m", "data": "d", "out": "o", "offload.ssd": "/tmp", key: "a\udcff"}
    with pytest.raises(ConfigError, match=r"path b'.*a\\xff' is not UTF-8"):
        check_places(read_settings(None, list(given.items())))
