"""The ``latentscan`` command. What takes long to import is imported by the verb that needs it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from latentscan import __version__
from latentscan.tools.broken_npu import set_aside

OK, CHECK_FAILED, BAD_INPUT = 0, 1, 2

app = typer.Typer(
    name="latentscan",
    help="Checked graph transformations for long-sequence models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A model directory, a config.json, a .gguf file, tiny:FAMILY or a local hub id."
    ),
]
Pipeline = Annotated[
    str,
    typer.Option("--pipeline", "-p", help="Passes as text: mha-to-mla{rank=128,rope_dim=32},latent-cache,mla-absorb."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and warnings; may stand anywhere.")] = False,
    show_version: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass  # `main` takes --debug out of the arguments; it is declared here for the help


@app.command("passes")
def passes_verb(as_json: Json = False) -> None:
    """Every pass, with its tier and one line."""
    from latentscan.tools.explain import SCHEMA, pass_rows

    rows = pass_rows()
    if as_json:
        print_json({"schema": SCHEMA, "passes": rows})
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("pass", "tier", ""):
        table.add_column(column)
    for row in rows:
        table.add_row(row["name"], row["tier"], row["summary"])
    stdout().print(table, highlight=False)


@app.command("explain")
def explain_verb(name: Annotated[str, typer.Argument(metavar="PASS")], as_json: Json = False) -> None:
    """What a pass does and why, its math, options and order."""
    from latentscan.tools.explain import explanation

    told = explanation(name)
    if as_json:
        print_json(told)
        return
    out = stdout()
    out.print(f"[bold]{told['name']}[/bold]  ({told['tier']}): {told['summary']}", highlight=False)
    for title, text in (("", told["description"]), ("math", told["math"]), ("works on", told["graphs"])):
        out.print(f"\n{title + ': ' if title else ''}{text}", markup=False, highlight=False)
    out.print("\noptions:" if told["options"] else "\noptions: none", highlight=False)
    for option in told["options"]:
        choices = f", one of {', '.join(option['choices'])}" if option["choices"] else ""
        default = str(option["default"]).lower() if option["default"] in (None, True, False) else option["default"]
        out.print(f"  {option['name']}={default}  ({option['type']}{choices})", markup=False, highlight=False)
    for title, key in (("comes after", "after"), ("comes before", "before"), ("needs", "needs")):
        if told[key]:
            out.print(f"{title}: {', '.join(told[key])}", highlight=False)
    if told["may_find_nothing"]:
        out.print("finding nothing is no error", highlight=False)


@app.command("plan")
def plan_verb(
    model: Model,
    pipeline: Pipeline = "",
    seq: Annotated[
        int, typer.Option(min=2, help="Tokens a row: of the prompt, of what is cached, or of a step.")
    ] = 32768,
    batch: Annotated[int, typer.Option(min=1, help="Rows.")] = 1,
    train: Annotated[bool, typer.Option("--train", help="A training step instead of prefill and decode.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Every site and refusal, and costs by kind of node.")
    ] = False,
    mesh: Annotated[str | None, typer.Option(help="Ranks to split over, such as tp=8; needs none of them.")] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="Bytes a second that leave a rank, such as 450G: what sending is hidden."),
    ] = None,
    flops: Annotated[
        str | None, typer.Option(metavar="RATE", help="Operations a second of a rank, for that; 400T by default.")
    ] = None,
    as_json: Json = False,
) -> None:
    """What a pipeline would do and cost; needs no weights and no accelerator."""
    from latentscan.lowering.select import split_target
    from latentscan.passes.pipeline import parse

    pipeline, _ = split_target(pipeline)  # what is planned is the same for all
    parse(pipeline)  # before anything slow
    with progress("planning") as step:
        from latentscan.runtime.source import resolve
        from latentscan.tools.plan import plan

        data = plan(
            resolve(model), pipeline, batch=batch, seq=seq, train=train, explain=explain, mesh=mesh,
            bandwidth=bandwidth, flops=flops, step=step,
        )  # fmt: skip
    if as_json:
        print_json(data)
    else:
        from latentscan.tools.plan_text import show

        show(data, stdout(), explain=explain)
    if data["errors"]:
        raise typer.Exit(BAD_INPUT)


@app.command("advise")
def advise_verb(
    model: Model,
    gpus: Annotated[int, typer.Option(min=1, help="How many GPUs.")],
    memory: Annotated[str, typer.Option(help="Memory of each, such as 80G.")],
    seq: Annotated[int, typer.Option(min=2, help="Tokens a row.")] = 32768,
    batch: Annotated[int | None, typer.Option(min=1, help="Rows of a step; one a GPU if left out.")] = None,
    as_json: Json = False,
) -> None:
    """Which parallelism and recomputation a training step needs on so many GPUs; needs no weights."""
    with progress("advising") as step:
        from latentscan.runtime.source import resolve
        from latentscan.tools.advise import advise, memory_of, show

        size = memory_of(memory)
        data = advise(resolve(model), gpus=gpus, memory=size, seq=seq, batch=batch, step=step)
    if as_json:
        print_json(data)
    else:
        show(data, stdout())
    if data["best"] is None:
        raise typer.Exit(CHECK_FAILED)


@app.command("convert")
def convert_verb(
    model: Model,
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="A directory that does not exist, or that latentscan made.")
    ],
    pipeline: Pipeline,
    calibration: Annotated[Path | None, typer.Option(help="Text for passes that measure activations.")] = None,
    export_as: Annotated[
        str | None,
        typer.Option("--export", metavar="FORM", help="deepseek-v3: write a model that plain transformers reads too."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Rewrite a model's weights and save it; read it with latentscan.load."""
    from latentscan.passes.pipeline import parse

    parse(pipeline)
    with progress("converting") as step:
        from latentscan.tools.convert import convert

        tell = _tells(as_json)
        told = convert(model, out, pipeline, calibration=calibration, export_as=export_as, step=step, tell=tell)
    _show_written(told, as_json)


@app.command("export")
def export_verb(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="What convert or heal wrote.")],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="A directory that does not exist, or that latentscan made.")
    ],
    form: Annotated[str, typer.Option("--to", metavar="FORM", help="deepseek-v3")] = "deepseek-v3",
    as_json: Json = False,
) -> None:
    """Write a converted model as one that plain transformers reads too."""
    with progress("exporting") as step:
        from latentscan.tools.convert import export_directory

        told = export_directory(directory, out, form, step=step, tell=_tells(as_json))
    _show_written(told, as_json)


def _tells(as_json: bool) -> Callable[[str], None]:
    """Prints what is told before anything is written; nothing where stdout is for JSON."""

    def tell(text: str) -> None:
        if not as_json:
            stdout().print(text, highlight=False)

    return tell


def _show_written(told: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(told)
        return
    text = f"{told['out']}: {told['files']} files, {told['bytes']:,} bytes"
    if "elements" in told:
        (before, after), (small, large) = told["elements"], told["weight_bytes"]
        original = f" (the original: {told['weights']['before']:,})" if "weights" in told else ""
        text += (
            f"\nfor plain transformers too: {before} -> {after} cached elements per token and layer, "
            f"{small:,} -> {large:,} bytes of weights{original}, logits within {told['error']:.1e}"
        )
    stdout().print(text, highlight=False)


@app.command("heal")
def heal_verb(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="What convert wrote, with a low-rank pass.")],
    data: Annotated[Path, typer.Option(help="Text to train on; its last twentieth is held out and measured.")],
    steps: Annotated[int, typer.Option(help="Optimiser steps in all.")] = 200,
    out: Annotated[Path | None, typer.Option(help="Where the healed model goes; DIR-healed by default.")] = None,
    teacher: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The original; by default what DIR was converted from.")
    ] = None,
    lr: Annotated[float, typer.Option(help="Peak learning rate of AdamW.")] = 1e-4,
    seq: Annotated[int, typer.Option(help="Tokens a row.")] = 128,
    batch: Annotated[int, typer.Option(help="Rows a step.")] = 4,
    train: Annotated[str, typer.Option(help="What is trained: attention (the converted ones) or all.")] = "attention",
    lora_rank: Annotated[int, typer.Option(help="Train factors of this rank beside frozen matrices; 0: all.")] = 0,
    hidden: Annotated[float, typer.Option(help="Weight of the hidden states' distance beside the logits'.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the order of rows and of factors.")] = 0,
    every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 50,
    device: Annotated[str, typer.Option(help="Where it runs: cpu, cuda.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Train a converted model to follow its original. The same command goes on after a kill."""
    from latentscan.runtime.heal import Settings
    from latentscan.tools.heal import bar, heal, text_of

    settings = Settings(steps, batch, seq, lr, seed, train, lora_rank, hidden)
    with bar(steps) as (step, progress):
        told = heal(
            directory, data, settings, teacher=teacher, out=out, every=every, device=device, step=step,
            progress=progress,
        )  # fmt: skip
    if as_json:
        print_json(told)
    else:
        stdout().print(text_of(told), highlight=False)


@app.command("dump")
def dump_verb(
    model: Model,
    pipeline: Pipeline,
    out: Annotated[Path, typer.Option("--out", help="The folder: one that does not exist, or an earlier dump.")],
    check: Annotated[bool, typer.Option(help="Compare the numbers after every pass; needs weights.")] = True,
    calibration: Annotated[Path | None, typer.Option(help="Text for passes that measure activations.")] = None,
    as_json: Json = False,
) -> None:
    """The graph before and after every pass, what matched and what was refused, as a folder of texts."""
    from latentscan.passes.pipeline import parse

    parse(pipeline)
    with progress("dumping") as step:
        from latentscan.runtime.dumping import check_folder
        from latentscan.runtime.source import resolve
        from latentscan.tools.dump import dump

        check_folder(out)
        source = resolve(model)
        step("loading")
        loaded = source.load() if source.has_weights else source.on_meta()
        step("running the passes")
        text = str(calibration) if calibration else None
        told = dump(loaded, pipeline, str(out), check=check and source.has_weights, calibration=text)
    if as_json:
        print_json(told)
    else:
        stdout().print(f"{out / 'index.md'}", highlight=False)


@app.command("diff")
def diff_verb(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that dump wrote.")],
    name: Annotated[str | None, typer.Argument(metavar="PASS", help="One pass; all by default.")] = None,
) -> None:
    """What a pass changed."""
    from latentscan.tools.dump import diff

    typer.echo(diff(str(folder), name))


@app.command("emit")
def emit_verb(
    model: Model,
    out: Annotated[Path, typer.Option("--out", help="The folder: one that does not exist, or that emit made.")],
    target: Annotated[str, typer.Option(help="What is emitted for: ascend.")] = "ascend",
    pipeline: Pipeline = "",
    chip: Annotated[str, typer.Option(help="910B3 or 950.")] = "910B3",
    seq: Annotated[int, typer.Option(min=2, help="Tokens a row, which launches are counted for.")] = 32768,
    batch: Annotated[int, typer.Option(min=1, help="Rows.")] = 1,
    train: Annotated[bool, typer.Option("--train", help="A training step instead of prefill and decode.")] = False,
    dtype: Annotated[str, typer.Option(help="float16 or bfloat16; the model's by default.")] = "",
    as_json: Json = False,
) -> None:
    """Graph, kernels, tilings and build script for a target; needs no weights and no accelerator."""
    from latentscan.ir.errors import PipelineError
    from latentscan.lowering.select import split_target
    from latentscan.passes.pipeline import parse

    if target != "ascend":
        raise PipelineError(f"nothing is emitted for target {target!r}", remedy="use --target ascend")
    pipeline, _ = split_target(pipeline, target)
    parse(pipeline)
    with progress("emitting") as step:
        from latentscan.runtime.source import resolve
        from latentscan.tools.emit import NOTE, check_out, emit

        check_out(out)
        told = emit(
            resolve(model), out, pipeline=pipeline, batch=batch, seq=seq, train=train, chip=chip, dtype=dtype, step=step
        )
    if as_json:
        print_json(told)
    else:
        stdout().print(f"{out / 'README.md'}\n{NOTE}", highlight=False)


def _add_bench() -> None:
    from latentscan.tools.bench import app as bench

    app.add_typer(bench, name="bench")


_add_bench()


def stdout() -> Any:
    """A console on stdout; where that is no terminal, as wide as its texts need."""
    from rich.console import Console

    console = Console(emoji=False)  # tiny:llama: is a name, not a picture
    return console if console.is_terminal else Console(emoji=False, width=int(os.environ.get("COLUMNS", 160)))


def print_json(data: Any) -> None:
    """One JSON object with sorted keys on stdout."""
    typer.echo(json.dumps(data, sort_keys=True, indent=2, ensure_ascii=False))


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[str], None]]:
    """A status line on stderr, where that is a terminal; yields the function that changes its text."""
    from rich.console import Console

    console = Console(stderr=True, emoji=False)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status(what) as status:
        yield lambda text: status.update(f"{what}: {text}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit status: 0, 1 (a check failed), 2 (bad input)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    given = [a for a in given if a != "--debug"]
    if not debug:
        warnings.simplefilter("ignore")
        logging.raiseExceptions = False  # torch 2.11 prints a traceback where it fails to log its own metrics
    try:
        try:
            if given and not {"--help", "--version"} & set(given):
                set_aside(lambda text: typer.echo(f"latentscan: {text}", err=True))
            app(given, prog_name="latentscan")
        finally:
            sys.stdout.flush()  # what cannot be written must be told by the exit status
    except SystemExit as end:  # how typer ends, also after a wrong argument
        if isinstance(end.__context__, BrokenPipeError):
            return OK  # whoever read the output has had enough
        return end.code if isinstance(end.code, int) else OK
    except BrokenPipeError:
        _discard_output()
        return OK
    except Exception as error:
        from latentscan.ir.errors import LatentscanError, NumericsError, VerifyError

        if isinstance(error, OSError):
            _discard_output()
        if debug or not isinstance(error, (LatentscanError, OSError)):
            raise
        typer.echo(f"latentscan: {error}", err=True)
        return CHECK_FAILED if isinstance(error, (NumericsError, VerifyError)) else BAD_INPUT
    return OK


def _discard_output() -> None:
    """Let what stdout cannot write go nowhere: the interpreter would fail on it once more as it ends."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        return
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


if __name__ == "__main__":
    sys.exit(main())
