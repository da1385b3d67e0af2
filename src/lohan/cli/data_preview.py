"""`lohan data preview`: the rendered rows with the loss mask, before anything is trained.

Owns the options and the printing. What is shown is worked out in `lohan.train.data.preview`.
"""

from typing import Annotated, Any

import typer

from lohan.cli.reading.extra_args import FREE_OPTIONS, read_extra_args, require_train_packages

data_commands = typer.Typer(name="data", help="Look at training rows.", no_args_is_help=True)


@data_commands.callback()
def _root() -> None:
    """Look at training rows."""


@data_commands.command(context_settings=FREE_OPTIONS)
def preview(
    ctx: typer.Context,
    file: Annotated[str, typer.Argument(help="Rows: .jsonl, .json, .csv, .parquet or .txt.")],
    model: Annotated[
        str, typer.Option(help="Folder or id of the model whose tokenizer and template are used.")
    ],
    rows: Annotated[int, typer.Option(min=0, help="Rows to show.")] = 3,
) -> None:
    """Show rendered rows with the loss mask, token counts, and what max_length cuts off.

    Training arguments that matter are given as for `lohan train`: --max_length 2048,
    --assistant_only_loss true, --chat_template_path FILE, --task dpo.
    """
    import tempfile

    from lohan.cli.tables.output import console
    from lohan.errors import ConfigError

    require_train_packages()
    path, overrides = read_extra_args(ctx.args)
    if path is not None:
        raise ConfigError(
            f'"{path}" stands alone', why="one file is shown at a time", remedy="leave it out"
        )
    from lohan.train.data.dataset import load_rows
    from lohan.train.data.preview import prepare_tokens, preview_rows
    from lohan.train.data.tokenizing import load_tokenizer
    from lohan.train.settings.arguments import make_arguments, refuse_impossible
    from lohan.train.settings.config import load_config
    from lohan.train.weights.model_places import CONFIGURATION, TOKENIZER, find_place

    with tempfile.TemporaryDirectory() as folder:
        given = [("model", model), ("data", file), ("out", folder), ("offload.ssd", folder)]
        config = load_config(None, [*overrides, *given])
        args = make_arguments(config)
        refuse_impossible(args)
        text_column = config.arguments.get("dataset_text_field")
        task = config.task
        found = load_rows([file], text_column=text_column, forms=task.rows)
        place = find_place(model, wanted=(*CONFIGURATION, *TOKENIZER))
        tokenizer = load_tokenizer(place, args)
        prepared = prepare_tokens(found, tokenizer, args, model, task.trainer_class())
        shown = preview_rows(prepared, tokenizer, num_shown=rows, max_length=args.max_length)
    _print(shown, found.format_name, console())


def _print(shown: Any, format_name: str, console: Any) -> None:
    from rich.text import Text

    for row in shown.rows:
        console.print(
            f"{row.name}: {row.num_tokens} tokens, {row.num_trained_tokens} with loss",
            style="bold",
        )
        text = Text()
        for piece in row.pieces:
            if console.is_terminal:
                text.append(piece.text, style="green" if piece.is_trained else "dim")
            else:
                text.append(f"[loss]{piece.text}[/loss]" if piece.is_trained else piece.text)
        console.print(text, soft_wrap=True)
        console.print()
    if shown.rows:
        console.print(
            "green text is trained on, the rest is only read"
            if console.is_terminal
            else "text between [loss] and [/loss] is trained on, the rest is only read"
        )
    share = shown.num_trained_tokens / max(1, shown.num_tokens)
    console.print(
        f"{shown.num_rows:,} rows of the form {format_name}: {shown.num_tokens:,} tokens, "
        f"{shown.num_trained_tokens:,} with loss ({share:.0%}); the longest row has "
        f"{shown.longest_tokens:,}"
    )
    if shown.max_length is None:
        console.print("max_length is not set: no row is cut off")
        return
    line = f"{shown.num_truncated:,} rows are longer than max_length={shown.max_length}"
    if shown.num_truncated:
        line += " and are cut off"
    if shown.num_dropped:
        line += f"; {shown.num_dropped:,} of them have no token with a loss left and are dropped"
    console.print(line)
