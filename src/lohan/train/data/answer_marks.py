"""Chat templates that mark what the assistant wrote, for `assistant_only_loss`.

TRL builds the loss mask from generation marks in a template. It has marked versions of some
templates and refuses all others; owns marking those. Called by the trainer and the preview.

Note "marks from beginnings". A template is not edited. It becomes a macro, which renders the chat
whole, up to each answer with the prompt for it, and up to the answer's end. Both must be beginnings
of the whole, and the answer is what lies between them: what a model has to write after the prompt
it is given, the end of its turn included. A row for which they are not is refused.
"""

import contextlib
import re
from collections.abc import Iterator
from typing import Any, cast

from trl.chat_template_utils import get_training_chat_template, has_generation_markers
from trl.trainer import sft_trainer

from lohan.errors import ConfigError
from lohan.train.data.dataset import TrainingRows

# A template sees these names, so they are ones that none has. Jinja takes the first newline after
# a tag away, and "+" keeps the spaces before one.
_MARKED = """\
{%- macro lohan_rendered(messages, add_generation_prompt) %}
TEMPLATE{%+ endmacro -%}
{%- macro lohan_refuse(number, what) -%}
{{- raise_exception('where the answer in message ' ~ number ~ ' begins and ends cannot be told: '
    ~ what) -}}
{%- endmacro -%}
{%- set lohan_whole = lohan_rendered(messages, add_generation_prompt) -%}
{%- set lohan_done = namespace(end=0) -%}
{%- for lohan_message in messages -%}
{%- if lohan_message.role == 'assistant' -%}
{%- set lohan_before = lohan_rendered(messages[:loop.index0], true) -%}
{%- set lohan_through = lohan_rendered(messages[:loop.index], false) -%}
{%- set lohan_begin = lohan_before | length -%}
{%- set lohan_end = lohan_through | length -%}
{%- if not lohan_whole.startswith(lohan_before) or lohan_begin < lohan_done.end -%}
{{- lohan_refuse(loop.index, 'the prompt for it is not how the chat with it begins') -}}
{%- elif not lohan_whole.startswith(lohan_through) or lohan_end < lohan_begin -%}
{{- lohan_refuse(loop.index, 'it is written differently when messages follow') -}}
{%- endif -%}
{{- lohan_whole[lohan_done.end:lohan_begin] -}}
{%- generation -%}{{- lohan_whole[lohan_begin:lohan_end] -}}{%- endgeneration -%}
{%- set lohan_done.end = lohan_end -%}
{%- endif -%}
{%- endfor -%}
{{- lohan_whole[lohan_done.end:] -}}
"""
_LAST_NEWLINE = re.compile(r"(\r\n|\r|\n)\Z")


def answer_template(rows: TrainingRows, tokenizer: Any, args: Any) -> str | None:
    """The template that rows are tokenized with; None for the tokenizer's own.

    Raises:
        ConfigError: only answers are to be trained on, and rows are no chats.
    """
    if not getattr(args, "assistant_only_loss", False):
        return None
    if not rows.is_chat:
        raise ConfigError(
            f"assistant_only_loss is on and the rows are of the form {rows.format_name}",
            why="an answer is a message of the assistant, and these are texts",
            remedy="give chats, or leave assistant_only_loss out; of a prompt and a completion the "
            "completion alone is trained on",
        )
    return None if has_generation_markers(tokenizer.chat_template) else marked_template(tokenizer)


def marked_template(tokenizer: Any) -> str | None:
    """TRL's marked version of a tokenizer's template, or one that finds its marks itself."""
    try:
        return cast("str | None", get_training_chat_template(tokenizer))
    except ValueError:
        return with_marks(tokenizer.chat_template)


def with_marks(template: str | dict[str, str]) -> str:
    """A template that renders as the given one, and marks what the assistant wrote."""
    if isinstance(template, str):
        return _MARKED.replace("TEMPLATE", _body(template))
    # Variants by name: as a tokenizer does it, rows with tools have one of their own.
    default = _body(template["default"])
    with_tools = _body(template.get("tool_use", template["default"]))
    chosen = f"{{% if tools is not none %}}\n{with_tools}{{%+ else %}}\n{default}{{%+ endif %}}"
    return _MARKED.replace("TEMPLATE", chosen)


def _body(template: str) -> str:
    """A template without the newline at its end, which Jinja ignores there only."""
    return _LAST_NEWLINE.sub("", template)


@contextlib.contextmanager
def every_template_marked() -> Iterator[None]:
    """Within it, TRL's trainer takes every chat template; its own marks go first."""
    plain = sft_trainer.get_training_chat_template
    sft_trainer.get_training_chat_template = marked_template
    try:
        yield
    finally:
        sft_trainer.get_training_chat_template = plain
