"""`lohan simulate`: the same answer as `lohan plan`, with the timeline behind it.

Owns the command's options and which part of the timeline is shown. Files are written by `files`,
drawn by `lohan.report` and `lohan.trace`.
"""

import pathlib
from typing import Annotated

import typer

from lohan.cli.reading import options

EXIT_DOES_NOT_FIT = 1
TraceOption = Annotated[
    pathlib.Path | None,
    typer.Option(
        "--trace", help="Write the steady steps as JSON for Perfetto or chrome://tracing."
    ),
]
SvgOption = Annotated[
    pathlib.Path | None, typer.Option("--svg", help="Draw the lanes of the steady steps.")
]
ScheduleOption = Annotated[
    pathlib.Path | None, typer.Option("--schedule", help="Write one step's tasks as text.")
]
StepsOption = Annotated[
    int, typer.Option("--steps", help="Steady steps to show in the trace and the picture, 1 to 8.")
]


def simulate(
    model: options.ModelArgument,
    machine: options.MachineOption = None,
    batch: options.BatchOption = 8,
    seq: options.SequenceOption = None,
    ram: options.RamOption = None,
    gpu: options.GpuOption = None,
    ssds: options.SsdsOption = None,
    gpus: options.GpusOption = None,
    policy: options.PolicyOption = "lohan+",
    tokens: options.TokensOption = "50M",
    clip: options.ClipOption = None,
    trace: TraceOption = None,
    svg: SvgOption = None,
    schedule: ScheduleOption = None,
    steps: StepsOption = 1,
    force: options.ForceOption = False,
    json: options.JsonOption = False,
) -> None:
    """Run a plan on a virtual clock: numbers, timeline, picture.

    Exit code 0: done. 1: it does not fit, nothing is written. 2: the request cannot be met.
    """
    from lohan.cli.reading.files import check_outputs
    from lohan.cli.reading.request import OTHER_POLICIES, parse_tokens, request_of
    from lohan.cli.tables.output import console, print_json
    from lohan.cli.tables.plan_tables import show_answer
    from lohan.durable_files import replace_text
    from lohan.errors import ConfigError
    from lohan.report import lane_chart_svg
    from lohan.simulate.answers.answer import Answer, plan_of, with_limits, with_step
    from lohan.simulate.choose import Judge
    from lohan.simulate.timeline import MAX_STEPS, timeline_of

    if not 1 <= steps <= MAX_STEPS:
        raise ConfigError(
            f"--steps {steps} cannot be shown",
            why=f"steady steps repeat: 1 to {MAX_STEPS} of them tell everything",
            remedy=f"give 1 to {MAX_STEPS}",
        )
    check_outputs((trace, svg, schedule), force=force)
    num_tokens = parse_tokens(tokens)
    request = request_of(
        model=model,
        machine=machine,
        batch=batch,
        seq=seq,
        ram=ram,
        gpu=gpu,
        ssds=ssds,
        gpus=gpus,
        policy=policy,
        clip=clip,
    )
    judge = Judge(is_thorough=False)
    made = plan_of(request, judge)
    answer = Answer(request=request, plan=made)
    written: list[str] = []
    if made.ledger.fits:
        timeline = timeline_of(made, request.machine, num_steps=steps)
        answer = with_step(answer, timeline.step, num_tokens, judge)

        def picture() -> str:
            steady = timeline.steady()
            return lane_chart_svg(steady, start_seconds=0, end_seconds=timeline.seconds)

        makers = ((trace, timeline.chrome), (svg, picture), (schedule, timeline.text))
        for path, make in makers:
            if path is not None:
                replace_text(path, make())
                written.append(str(path))
    answer = with_limits(answer, OTHER_POLICIES)
    if json:
        print_json({**answer.to_fields(), "written_files": written})
    else:
        shown = console()
        show_answer(answer, shown)
        for path_text in written:
            shown.print(f"wrote {path_text}")
    if not made.ledger.fits:
        raise typer.Exit(EXIT_DOES_NOT_FIT)
