"""`lohan plan`: what a fine-tune will cost before it starts.

Owns the command's options. What is asked for is read by `request` and, in the words of a run, by
`run_words`; the answer is computed in `answer` and printed in `plan_tables`.
"""

import math
from dataclasses import replace
from typing import Annotated

import typer

from lohan.cli.reading import options

EXIT_DOES_NOT_FIT = 1
DEFAULT_TOKENS = "50M"


def plan(
    ctx: typer.Context,
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL | RUN.yaml]",
            help="A known name (lohan models), a config.json or its folder, or a hub id; or a "
            "run's file.",
            autocompletion=options.known_models,
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The model, as for training.")
    ] = None,
    machine: options.MachineOption = None,
    ssd: Annotated[
        list[str] | None,
        typer.Option(metavar="DIR", help="SSD directories of this machine, as for training."),
    ] = None,
    batch: Annotated[int | None, typer.Option("--batch", "-b", help=options.BATCH_HELP)] = None,
    seq: options.SequenceOption = None,
    ram: options.RamOption = None,
    gpu: options.GpuOption = None,
    ssds: options.SsdsOption = None,
    gpus: options.GpusOption = None,
    machines: Annotated[
        int, typer.Option("--machines", min=1, help="So many such machines that train together.")
    ] = 1,
    network: Annotated[
        str | None, typer.Option("--network", help="Between the machines, such as 10Gbit/s.")
    ] = None,
    policy: options.PolicyOption = "lohan+",
    tokens: Annotated[
        str | None,
        typer.Option(
            "--tokens",
            help="Tokens of the whole run, such as 50M or 1.2B. [default: of max_steps, or 50M]",
        ),
    ] = None,
    clip: options.ClipOption = None,
    chunked_loss: Annotated[
        bool,
        typer.Option(
            "--chunked-loss", help="Compute the loss in chunks where logits would need most memory."
        ),
    ] = False,
    json: options.JsonOption = False,
) -> None:
    """Say whether a fine-tune fits, how long it takes, what it wears and what to change.

    Settings may be written as for training, in RUN.yaml or as --per_device_train_batch_size 2,
    --gradient_accumulation_steps 16, --max_length 2048, --max_grad_norm 0; --lora_r 16 plans an
    adapter. What a run would do with its own rows is told by lohan train --dry-run.

    Exit code 0: it fits. 1: it does not. 2: the request cannot be met.
    """
    from lohan.cli.reading.request import OTHER_POLICIES, as_ranks, parse_tokens, request_of
    from lohan.cli.reading.run_words import rooms_of, run_words, write_limit_of
    from lohan.cli.tables.output import console, print_json
    from lohan.cli.tables.plan_tables import show_answer
    from lohan.engine.planning.write_limit import planned_within
    from lohan.schedule.build import build_schedule
    from lohan.schedule.check import check_serial
    from lohan.simulate.answers.answer import Answer, plan_of, totals_of, with_limits, with_step
    from lohan.simulate.choose import Judge, Judged
    from lohan.simulate.quick import uncollected
    from lohan.units import format_bytes_decimal

    words = run_words(what, model, ctx.args)
    request = request_of(
        model=words.model,
        machine=machine or words.machine,
        batch=words.batch if batch is None else batch,
        seq=words.sequence if seq is None else seq,
        ram=words.ram if ram is None else ram,
        gpu=words.gpu if gpu is None else gpu,
        ssds=ssds,
        gpus=gpus,
        policy=policy,
        clip=words.clip if clip is None else clip,
        num_directories=len(ssd or words.ssd) or None,
        rated_lives_bytes=words.rated_lives_bytes,
        adapter=words.adapter,
        should_chunk_loss=chunked_loss or words.should_chunk_loss,
    )
    if machines > 1:
        request = as_ranks(request, machines, network)
    num_tokens = (
        words.num_steps * request.workload.num_tokens
        if tokens is None and words.num_steps is not None
        else parse_tokens(tokens or DEFAULT_TOKENS)
    )
    judge = Judge(is_thorough=False)
    if ssd:
        words = replace(words, ssd=tuple(ssd))
    with uncollected():
        made = plan_of(request, judge)
        taken: Judged | None = judge.best(request.question)
        limit = write_limit_of(words, math.ceil(num_tokens / request.workload.num_tokens))
        if limit is not None and (taken := planned_within(request.question, limit, judge)):
            made = taken.plan
        rooms = rooms_of(words, made) if ssds is None else []
        answer = Answer(request=request, plan=made, rooms=tuple(rooms))
        if taken is not None:
            check_serial(build_schedule(taken.plan, num_steps=2))
        # What else there could be is asked of one machine.
        if taken is not None and machines > 1:
            answer = replace(answer, step=taken.step, run=totals_of(taken.step, num_tokens))
        elif taken is not None:
            answer = with_step(answer, taken.step, num_tokens, judge)
        if machines == 1:
            answer = with_limits(answer, OTHER_POLICIES)
    fields = answer.to_fields()
    if limit is not None and taken is not None:
        run_bytes = limit.run_bytes(taken.plan, taken.step.written_bytes)
        fields["write_budget"] = {"budget_bytes": limit.budget_bytes, "run_bytes": run_bytes}
    if json:
        print_json(fields)
    else:
        show_answer(answer, console())
        if limit is not None and taken is not None:
            console().print(
                f"write budget: {format_bytes_decimal(run_bytes)} of "
                f"{format_bytes_decimal(limit.budget_bytes)} for the whole run, first states and "
                f"{limit.num_seals:,} seal(s) included"
            )
    if not made.ledger.fits:
        raise typer.Exit(EXIT_DOES_NOT_FIT)
