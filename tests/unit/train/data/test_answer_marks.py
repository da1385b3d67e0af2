"""`assistant_only_loss` trains on the assistant's words and the ends of its turns, nothing else."""

import itertools
import pathlib
from typing import Any

import datasets
import jinja2
import pytest
import trl
from transformers.utils.chat_template_utils import render_jinja_template
from trl.chat_template_utils import get_training_chat_template, has_generation_markers

import lohan
from lohan.errors import ConfigError
from lohan.train.data.answer_marks import marked_template, with_marks
from lohan.train.data.dataset import load_rows
from lohan.train.data.preview import prepare_tokens
from support import tiny_chat
from support.chat_families import CHAT, CHATML, FAMILIES, Family, shown, trl_template

TEMPLATES = pathlib.Path(trl.__file__).parent / "chat_templates"
UNMARKED = sorted(
    path.stem
    for path in TEMPLATES.glob("*.jinja")
    if not has_generation_markers(path.read_text(encoding="utf-8"))
)
# TRL marked these where the prompt for an answer ends, and changed nothing else.
MARKED_LIKEWISE = (
    *("cohere", "cohere2", "gemma", "gemma3", "idefics3", "lfm2", "lfm2_v2", "llama3"),
    *("qwen2_5_vl", "qwen3_instruct_2507", "qwen3_vl", "smolvlm"),
)
CHATS = {
    "one turn": CHAT[1:3],
    "a system message": CHAT[:3],
    "two turns": CHAT[1:],
    "both": CHAT,
    "a question at the end": CHAT[:4],
    "spaces around": [
        {"role": "user", "content": " red\n"},
        {"role": "assistant", "content": "\n\nblue \n"},
    ],
}


def previewed(
    folder: pathlib.Path, tokenizer: Any, *rows: dict[str, Any], **changes: Any
) -> list[str]:
    path = tiny_chat.write_jsonl(folder / "rows.jsonl", list(rows))
    given = {"assistant_only_loss": True, **changes}
    args = trl.SFTConfig(output_dir=str(folder), use_cpu=True, **given)
    prepared = prepare_tokens(load_rows([str(path)]), tokenizer, args, "m")
    return [shown(row["input_ids"], row["labels"], tokenizer) for row in prepared]


def trainer_of(kind: Any, folder: pathlib.Path, tokenizer: Any, *chats: Any) -> Any:
    """A trainer of ours or TRL's that has prepared its rows."""
    more = {"offload": {"ssd": str(folder)}} if kind is lohan.SFTTrainer else {}
    return kind(
        model=tiny_chat.model(vocab_size=400),
        args=trl.SFTConfig(
            output_dir=str(folder), use_cpu=True, assistant_only_loss=True, max_length=None
        ),
        train_dataset=datasets.Dataset.from_list([{"messages": chat} for chat in chats]),
        processing_class=tokenizer,
        **more,
    )


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_the_mask_is_the_one_written_by_hand(tmp_path: pathlib.Path, family: Family) -> None:
    tokenizer = family.tokenizer()
    (found,) = previewed(tmp_path, tokenizer, {"messages": family.chat})
    assert found.endswith(family.expected)
    before = found.removesuffix(family.expected)
    assert "[[" not in before
    # The trainer gives the same; where TRL's own takes the template, that gives it too.
    for kind in (lohan.SFTTrainer, trl.SFTTrainer):
        try:
            prepared = trainer_of(kind, tmp_path, tokenizer, family.chat).train_dataset[0]
        except ValueError:
            assert kind is trl.SFTTrainer
            assert not is_known_to_trl(tokenizer)
            continue
        assert shown(prepared["input_ids"], prepared["labels"], tokenizer) == found
        assert tokenizer.chat_template == family.template


def is_known_to_trl(tokenizer: Any) -> bool:
    return marked_template(tokenizer) != with_marks(tokenizer.chat_template)


def test_what_trl_marks_is_marked_by_trl() -> None:
    for name in UNMARKED:
        tokenizer = tiny_chat.tokenizer()
        tokenizer.chat_template = trl_template(name)
        if (TEMPLATES / f"{name}_training.jinja").exists():
            assert marked_template(tokenizer) == get_training_chat_template(tokenizer)


def rendered(
    template: str, chat: list[dict[str, str]], *, prompts: bool = False, marks: bool = False
) -> tuple[str, list[str]]:
    """A chat as text, and the texts between marks."""
    texts, places = render_jinja_template(
        conversations=[chat],
        chat_template=template,
        return_assistant_tokens_mask=marks,
        add_generation_prompt=prompts,
        bos_token="<s>",
        eos_token="</s>",
    )
    return texts[0], [texts[0][begin:end] for begin, end in (places[0] if marks else [])]


def marked_or_refused(
    template: str, chat: list[dict[str, str]], *, prompts: bool = False
) -> tuple[str, list[str]] | None:
    """As `rendered` with marks from beginnings; None where these cannot be told."""
    try:
        return rendered(with_marks(template), chat, prompts=prompts, marks=True)
    except jinja2.TemplateError as error:
        if "cannot be told" not in str(error):
            raise
        return None


@pytest.mark.parametrize("name", UNMARKED)
def test_marks_leave_the_text_as_it_was(name: str) -> None:
    template = trl_template(name)
    for chat, prompts in itertools.product(CHATS.values(), (False, True)):
        try:
            text, _ = rendered(template, chat, prompts=prompts)
        except jinja2.TemplateError:
            assert name not in ("llama3_1", "gemma3", "qwen3", "gptoss")
            continue
        found = marked_or_refused(template, chat, prompts=prompts)
        if found is not None:
            assert found[0] == text
            assert len(found[1]) == sum(message["role"] == "assistant" for message in chat)
        if name in MARKED_LIKEWISE:
            judge = trl_template(f"{name}_training")
            assert found == rendered(judge, chat, prompts=prompts, marks=True)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}|{% endfor %}",
        "\n\n  {% for m in messages %}\n  [{{ m.role }}]{{ m.content }}|\n{% endfor %}  \n\n",
        "{{ one(2) if one is defined }}{% macro one(n) %}{{ two(n) }}{% endmacro %}"
        "{% macro two(n) %}<{{ n }}>{% endmacro %}{% set end = '|' %}{% for m in messages %}"
        "{{ one(loop.index) }}{{ m.content }}{{ end }}{% endfor %}\r\n",
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{{ m.content }}\n{% endfor %}\t",
    ],
)
def test_spaces_and_macros_of_a_template_mean_what_they_meant(template: str) -> None:
    # Without an answer there is nothing but the text.
    assert rendered(with_marks(template), CHAT[:2])[0] == rendered(template, CHAT[:2])[0]


def test_named_templates_are_chosen_by_tools() -> None:
    tokenizer = FAMILIES["smollm2"].tokenizer()
    tokenizer.chat_template = {"default": CHATML, "tool_use": "{{ tools[0].name }}" + CHATML}
    marked = marked_template(tokenizer)
    for tools in (None, [{"name": "clock"}]):
        own = tokenizer.apply_chat_template(CHAT, tools=tools, tokenize=False)
        with_tools = tokenizer.apply_chat_template(
            CHAT, tools=tools, tokenize=False, chat_template=marked
        )
        assert with_tools == own
        assert own.startswith("clock") == (tools is not None)


def test_a_prompt_and_a_completion_are_trained_on_where_both_say_so(tmp_path: pathlib.Path) -> None:
    tokenizer = FAMILIES["smollm2"].tokenizer()
    row = {"prompt": CHAT[:4], "completion": CHAT[4:]}
    (found,) = previewed(tmp_path, tokenizer, row)
    assert found.count("[[") == 1
    assert found.endswith("<|im_start|>assistant\n[[two<|im_end|>\n]]")


def test_the_end_of_a_turn_is_trained_on_where_it_pads_too(tmp_path: pathlib.Path) -> None:
    tokenizer = FAMILIES["smollm2"].tokenizer()
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    trainer = trainer_of(lohan.SFTTrainer, tmp_path, tokenizer, CHAT, CHAT[1:3])
    batch = trainer.data_collator([trainer.train_dataset[0], trainer.train_dataset[1]])
    ends = (batch["labels"] == tokenizer.eos_token_id).sum(dim=1)
    assert ends.tolist() == [2, 1]


@pytest.mark.parametrize(
    ("family", "chat", "why"),
    [
        ("mistral", CHAT, "message 3 begins and ends cannot be told: the prompt for it is not"),
        ("qwen3", CHAT, "message 3 begins and ends cannot be told: it is written differently"),
        ("smollm2", CHAT[2:], "message 1 begins and ends cannot be told"),
        ("smollm2", CHAT[1:2], "no message is the assistant's (roles: user)"),
    ],
)
def test_a_row_whose_answers_cannot_be_told_is_refused(
    tmp_path: pathlib.Path, family: str, chat: list[dict[str, str]], why: str
) -> None:
    tokenizer = FAMILIES[family].tokenizer()
    tokenizer.chat_template += "{# not the one TRL knows #}"
    with pytest.raises(ConfigError, match="refuses row 2") as refused:
        previewed(tmp_path, tokenizer, {"messages": CHAT[1:3]}, {"messages": chat})
    assert why in str(refused.value)


def test_texts_have_no_answers(tmp_path: pathlib.Path) -> None:
    tokenizer = FAMILIES["smollm2"].tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="the rows are of the form text"):
        previewed(tmp_path, tokenizer, {"text": "red"})


def test_plain_trl_is_left_as_it_was(tmp_path: pathlib.Path) -> None:
    tokenizer = FAMILIES["smollm2"].tokenizer()
    with pytest.raises(jinja2.TemplateError, match="message 1"):
        trainer_of(lohan.SFTTrainer, tmp_path, tokenizer, CHAT[2:])
    with pytest.raises(ValueError, match="patching is not supported"):
        trainer_of(trl.SFTTrainer, tmp_path, tokenizer, CHAT)
