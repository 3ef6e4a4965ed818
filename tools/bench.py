"""``latentscan bench``: measurements, a verb each."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(name="bench", help="Measurements on this machine.", no_args_is_help=True)


@app.command("generate")
def generate_verb(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="As for the other verbs; a config.json is filled with random weights.",
        ),
    ],
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 512,
    new: Annotated[int, typer.Option(min=2, help="Tokens to generate after it.")] = 32,
    batch: Annotated[int, typer.Option(min=1, help="Rows.")] = 1,
    pipeline: Annotated[str, typer.Option("--pipeline", "-p", help="Passes, as for the other verbs.")] = "",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto: the weights' own.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU if there is one.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Tokens a second of prefill and decode, and the bytes of a model's states."""
    from latentscan.tools.bench_generate import generate, lines
    from latentscan.tools.cli import print_json, progress, stdout

    with progress("measuring") as step:
        told = generate(
            model, prompt=prompt, new=new, batch=batch, pipeline=pipeline, dtype=dtype, device=device, step=step
        )
    if as_json:
        print_json(told)
        return
    for line in lines(told):
        stdout().print(line, highlight=False, markup=False)


@app.command("ssd")
def ssd_verb(
    shape: Annotated[
        str, typer.Option(help="mamba2-2.7b, nemotron-h-8b, bamba-9b or heads,head_dim,groups,d_state.")
    ] = "mamba2-2.7b",
    seq: Annotated[int, typer.Option(min=1, help="Tokens a row.")] = 32768,
    batch: Annotated[int, typer.Option(min=1, help="Rows.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Time, floors, peak memory and error of the chunk scan on this machine, beside peers that are installed."""
    from latentscan.tools import bench_ssd
    from latentscan.tools.cli import print_json, progress, stdout

    with progress("measuring") as step:
        data = bench_ssd.bench_ssd(shape, seq=seq, batch=batch, step=step)
    if as_json:
        print_json(data)
    else:
        bench_ssd.show(data, stdout())


@app.command("parallel")
def parallel_verb(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="llama-7b, mamba2-2.7b, nemotron-h-8b, or as for the other verbs; random weights."
        ),
    ] = "llama-7b",
    mesh: Annotated[str, typer.Option(help="Ranks by axis, such as tp=2,cp=2; as many as torchrun starts.")] = "tp=2",
    pipeline: Annotated[
        str, typer.Option("--pipeline", "-p", help="Passes; overlap-collectives is added and left out by the variants.")
    ] = "tensor-parallel,sequence-parallel",
    layers: Annotated[int | None, typer.Option(min=1, help="The first so many layers.")] = None,
    seq: Annotated[int, typer.Option(min=2, help="Tokens a row, of all ranks together.")] = 8192,
    batch: Annotated[int, typer.Option(min=1, help="Rows, of all ranks together.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are timed.")] = 5,
    warmup: Annotated[int, typer.Option(min=1, help="Steps before them.")] = 2,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, or auto: bfloat16 on a GPU.")] = "auto",
    recompute: Annotated[str, typer.Option(help="none, or full: gradient checkpointing of every layer.")] = "none",
    optimizer: Annotated[str, typer.Option(help="adamw, sgd or none.")] = "adamw",
    inductor: Annotated[str, typer.Option(help="auto, on or off.")] = "auto",
    target: Annotated[str, typer.Option(help="auto, reference or triton.")] = "auto",
    variants: Annotated[
        str, typer.Option(help="Of one, plain, overlap, plain-silent, overlap-silent; by default all.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Step time, memory, exposed communication and loss parity of training over a mesh; run it under torchrun."""
    import os

    from latentscan.tools.bench_parallel import VARIANTS, Case, bench_parallel, show
    from latentscan.tools.cli import print_json, progress, stdout

    case = Case(
        model, mesh, pipeline, layers, seq, batch, steps, warmup, dtype, recompute, optimizer, inductor, target,
        tuple(v.strip() for v in variants.split(",")) if variants else VARIANTS,
    )  # fmt: skip
    with progress("measuring") as step:
        data = bench_parallel(case, step=step)
    if os.environ.get("RANK", "0") != "0":
        return
    if as_json:
        print_json(data)
    else:
        show(data, stdout())
