"""`lohan plan`: what a fine-tune will cost before it starts.

Owns the command's options. The answer is computed in `answer` and printed in `plan_tables`.
"""

import typer

from lohan.cli.options import (
    BatchOption,
    ClipOption,
    GpuOption,
    GpusOption,
    JsonOption,
    MachineOption,
    ModelArgument,
    PolicyOption,
    RamOption,
    SequenceOption,
    SsdsOption,
    TokensOption,
)

EXIT_DOES_NOT_FIT = 1


def plan(
    model: ModelArgument,
    machine: MachineOption,
    batch: BatchOption = 8,
    seq: SequenceOption = None,
    ram: RamOption = None,
    gpu: GpuOption = None,
    ssds: SsdsOption = None,
    gpus: GpusOption = None,
    policy: PolicyOption = "lohan+",
    tokens: TokensOption = "50M",
    clip: ClipOption = None,
    json: JsonOption = False,
) -> None:
    """Say whether a fine-tune fits, how long it takes, what it wears and what to change.

    Exit code 0: it fits. 1: it does not. 2: the request cannot be met.
    """
    from lohan.cli.answer import Answer, plan_of, with_limits, with_step
    from lohan.cli.output import console, print_json
    from lohan.cli.plan_tables import show_answer
    from lohan.cli.request import parse_tokens, request_of
    from lohan.simulate import simulate_plan
    from lohan.simulate.quick import QUICK_STEPS

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
    made = plan_of(request)
    answer = Answer(request=request, plan=made)
    if made.ledger.fits:
        step = simulate_plan(made, request.machine, num_steps=QUICK_STEPS)
        answer = with_step(answer, step, num_tokens)
    answer = with_limits(answer)
    if json:
        print_json(answer.to_fields())
    else:
        show_answer(answer, console())
    if not made.ledger.fits:
        raise typer.Exit(EXIT_DOES_NOT_FIT)
