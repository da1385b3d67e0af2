"""What the model will be trained on: rendered text with the loss mask, and lengths in tokens.

Owns the preview's numbers and pieces; printing is the command line's. The rows are prepared by
TRL's own code, so the mask shown is the mask trained with. Called by `lohan data preview`.
"""

import contextlib
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lohan.errors import ConfigError
from lohan.train.data.dataset import (
    TrainingRows,
    another_template,
    find_refused_row,
    refuse_missing_template,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPiece:
    """A stretch of text of which all tokens count for the loss, or none."""

    text: str
    is_trained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPreview:
    """One row as tokens."""

    name: str
    pieces: tuple[TextPiece, ...]
    num_tokens: int
    num_trained_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPreview:
    """Some rows, and the lengths of all."""

    rows: tuple[RowPreview, ...]
    num_rows: int
    num_tokens: int
    num_trained_tokens: int
    longest_tokens: int
    num_truncated: int
    """Rows longer than `max_length`."""
    num_dropped: int
    """Rows of which truncation leaves nothing to train on."""
    max_length: int | None


def prepare_tokens(
    rows: TrainingRows, tokenizer: Any, args: Any, model: str, kind: Any = None
) -> Any:
    """Tokens and labels of every row, whole, by TRL's own preparation.

    Args:
        kind: the trainer, where it is none of supervised fine-tuning; a row of it may be several.

    Raises:
        ConfigError: the tokenizer has no chat template, it refuses a row, which is named, or only
            answers are to be trained on and rows are no chats.
    """
    import copy

    import trl

    from lohan.train.data.answer_marks import answer_template

    refuse_missing_template(rows, tokenizer, model, args)
    whole = copy.copy(args)
    whole.max_length, whole.packing, whole.shuffle_dataset = None, False, False
    if kind is not None and not issubclass(kind, trl.SFTTrainer):
        with explained_rows(rows, tokenizer, args, None):
            return _answers(rows.table, tokenizer, whole, kind)
    template = answer_template(rows, tokenizer, args)
    is_completion = args.completion_only_loss
    if is_completion is None:
        is_completion = "completion" in rows.table.column_names
    # The attributes of a trainer that its preparation reads.
    trainer: Any = types.SimpleNamespace(
        _tokenizer=tokenizer, chat_template=template, completion_only_loss=is_completion
    )
    with explained_rows(rows, tokenizer, args, template):
        return trl.SFTTrainer._prepare_dataset(
            trainer, rows.table, tokenizer, whole, False, None, "preview"
        )


_NO_LIMIT = 10**9
_ROW, _ANSWER = "lohan_row", "lohan_answer"


def _answers(table: Any, tokenizer: Any, args: Any, kind: Any) -> list[dict[str, Any]]:
    """Every answer of every row as a sequence; what is asked has no label."""
    trainer = object.__new__(kind)
    # The attributes of a trainer that its preparation reads.
    vars(trainer).update(
        _tokenizer=tokenizer,
        processing_class=tokenizer,
        calculate_KL=False,
        is_encoder_decoder=False,
        max_length=_NO_LIMIT,
        desirable_weight=1.0,
        undesirable_weight=1.0,
    )
    if hasattr(kind, "_prepare_dataset"):
        table = kind._prepare_dataset(trainer, table, tokenizer, args, "preview")
    else:
        from trl.data_utils import maybe_apply_chat_template, maybe_extract_prompt

        table = table.map(maybe_extract_prompt)
        table = table.map(maybe_apply_chat_template, fn_kwargs={"processing_class": tokenizer})
        table = table.map(trainer.tokenize_row)
    ways = [names for names in kind.token_columns if set(names) <= set(table.column_names)]
    found = []
    for number, row in enumerate(table, start=1):
        for names in ways:
            *asked, answer = names
            tokens = [token for name in names for token in row[name]]
            labels = row.get(answer.replace("_input_ids", "_labels")) or tokens
            if asked:
                labels = [-100] * (len(tokens) - len(row[answer])) + row[answer]
            shown = answer.removesuffix("_ids").removesuffix("_input")
            found.append({"input_ids": tokens, "labels": labels, _ROW: number, _ANSWER: shown})
    return found


@contextlib.contextmanager
def explained_rows(
    rows: TrainingRows, tokenizer: Any, args: Any, template: str | None
) -> Iterator[None]:
    """Within it, an error of a chat template names the row."""
    try:
        yield
    except Exception as error:
        needs_answers = bool(getattr(args, "assistant_only_loss", False))
        found = (
            find_refused_row(rows, tokenizer, template, needs_answers=needs_answers)
            if rows.is_chat
            else None
        )
        if found is None:
            raise
        raise ConfigError(
            f"the chat template refuses row {found[0]}",
            why=found[1],
            remedy=f"correct or delete the row, or {another_template(args)}",
        ) from error


def preview_rows(
    prepared: Any, tokenizer: Any, *, num_shown: int, max_length: int | None
) -> DataPreview:
    """Count all rows and lay out the first ones."""
    totals = {"tokens": 0, "trained": 0, "longest": 0}
    truncated, dropped, number = set(), set(), 0
    shown = []
    for row in prepared:
        number = row.get(_ROW, number + 1)
        tokens, labels = row["input_ids"], row["labels"]
        trained = sum(label != -100 for label in labels)
        totals["tokens"] += len(tokens)
        totals["trained"] += trained
        totals["longest"] = max(totals["longest"], len(tokens))
        if max_length is not None and len(tokens) > max_length:
            truncated.add(number)
            if all(label == -100 for label in labels[:max_length]):
                dropped.add(number)
        if number <= num_shown:
            shown.append(
                RowPreview(
                    name=f"row {number}" + (f", {row[_ANSWER]}" if _ANSWER in row else ""),
                    pieces=_pieces(tokens, labels, tokenizer),
                    num_tokens=len(tokens),
                    num_trained_tokens=trained,
                )
            )
    return DataPreview(
        rows=tuple(shown),
        num_rows=number,
        num_tokens=totals["tokens"],
        num_trained_tokens=totals["trained"],
        longest_tokens=totals["longest"],
        num_truncated=len(truncated),
        num_dropped=len(dropped),
        max_length=max_length,
    )


def _pieces(tokens: Sequence[int], labels: Sequence[int], tokenizer: Any) -> tuple[TextPiece, ...]:
    """Stretches of equal mask; each is decoded as a whole, so that no letter is cut in two."""
    pieces: list[TextPiece] = []
    begin = 0
    for end in range(1, len(tokens) + 1):
        is_trained = labels[begin] != -100
        if end < len(tokens) and (labels[end] != -100) == is_trained:
            continue
        text = tokenizer.decode(tokens[begin:end], skip_special_tokens=False)
        pieces.append(TextPiece(text=text, is_trained=is_trained))
        begin = end
    return tuple(pieces)
