"""``latentscan bench``: measurements, a verb each."""

from __future__ import annotations

from pathlib import Path
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
    tune: Annotated[
        Path | None, typer.Option(help="Try tiles near the shipped ones, write the best to this table, and use them.")
    ] = None,
    table: Annotated[Path | None, typer.Option(help="Use the tiles of a table that --tune wrote.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Time, floors, peak memory and error of the chunk scan on this machine, beside peers that are installed."""
    from latentscan.tools import bench_ssd
    from latentscan.tools.cli import print_json, progress, stdout

    with progress("measuring") as step:
        data = bench_ssd.bench_ssd(shape, seq=seq, batch=batch, tune=tune, table=table, step=step)
    if as_json:
        print_json(data)
    else:
        bench_ssd.show(data, stdout())
