"""``latentscan advise``: which parallelism a training step needs on so many GPUs, with bytes and the formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch

from latentscan import __version__
from latentscan.ir import kept
from latentscan.ir.capture import capture
from latentscan.ir.cost import cost_by_kind, evaluate
from latentscan.ir.errors import PipelineError
from latentscan.ir.graph import REGION, Graph
from latentscan.ir.mesh import parse_mesh
from latentscan.ir.ops import ssm
from latentscan.ir.ops.state_exchange import cheaper
from latentscan.runtime.batch import split_batch
from latentscan.runtime.phases import Phase, values_of
from latentscan.runtime.source import Source
from latentscan.tools.break_even import Layer, layers_of

SCHEMA = 1  # of the dict that `advise` returns; raised when a field changes its meaning or goes
FLOPS, LINK, MEMORY = 400e12, 300e9, 4.0e12  # what is taken for a GPU's bf16 FLOP/s, its links and memory, bytes/s
CHUNKS = (32, 64, 128, 256, 512)
FORMULAS = {
    "weights": "2 P / tp", "gradients": "2 P / tp", "master": "4 P / (dp cp tp)",
    "optimizer": "8 P / (dp cp tp)",
    "activations": "what autograd keeps (ir/kept.py) of (B / dp) rows and S / cp tokens; / tp with sp",
    "time": "F (forward again where recomputed) / (N FLOP/s) + sent / link; sent = gradients 4 P (n - 1) / (n tp), "
    "n = dp cp; tp: 8 layers rows (S / cp) D 2 (tp - 1) / tp; states, both ways, less what the gate's projection hides",
    "chunk": "per token: (2 Q (H P + G N) + 4 H P N) / FLOP/s + 8 H P N / (Q bytes/s)",
}  # fmt: skip


@dataclass(frozen=True)
class Choice:
    """One way to share a step out. Bytes are those of one rank."""

    dp: int
    tp: int
    cp: int
    sp: bool
    recompute: bool
    weights: int
    gradients: int
    master: int
    optimizer: int
    activations: int
    sent: int
    seconds: float

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.master + self.optimizer + self.activations


@dataclass(frozen=True)
class _Step:
    """A traced training step: bytes and operations for any number of rows and tokens."""

    graph: Graph

    def values(self, rows: int, length: int) -> Any:
        return values_of(self.graph, Phase("train", rows, length, 0))

    def kept(self, rows: int, length: int) -> int:
        """What is kept for the backward; with recomputed layers, also what the largest of them keeps meanwhile."""
        values = self.values(rows, length)
        regions: dict[int, list[Any]] = {}
        for node in self.graph.graph.nodes:
            if REGION in node.meta:
                regions.setdefault(node.meta[REGION], []).append(node)
        again = max((evaluate(kept.total(kept.kept(self.graph, r)), values) for r in regions.values()), default=0)
        return evaluate(kept.total(kept.training(self.graph)), values) + again

    def flops(self, rows: int, length: int) -> int:
        """Of forward and backward; what recomputed layers do again is counted."""
        values = self.values(rows, length)
        return sum(k.flops.at(values) for k in self.costs.values())

    @cached_property
    def costs(self) -> Any:
        return cost_by_kind(self.graph, backward=True)


def traced_step(model: torch.nn.Module, *, recompute: bool) -> _Step:
    """The graph of a step with its loss, as context parallelism's ranks run it."""
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore
    model.train()
    ids = torch.ones(2, 6, dtype=torch.long, device=next(model.parameters()).device)
    batch = {k: v.clone() for k, v in split_batch({"input_ids": ids, "labels": ids}, parse_mesh("cp=1")).items()}
    return _Step(capture(model, inputs={**batch, "use_cache": False}, training=True))


def memory_of(text: str) -> int:
    """Bytes from text such as ``80G`` or ``141GiB``.

    Raises:
        PipelineError: it is no size.
    """
    units = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
    bare = text.strip().lower().removesuffix("ib").removesuffix("b")
    number, unit = (bare[:-1], bare[-1]) if bare[-1:] in "kmgt" and bare else (bare, "")
    try:
        value = int(float(number) * units[unit])
    except (ValueError, KeyError, OverflowError):
        value = 0
    if value <= 0:
        raise PipelineError(f"--memory {text!r} is no size", remedy="write it as 80G")
    return value


def chunk_length(layer: Layer) -> int:
    """The chunk length with the least time a token by the formula above."""
    HP, N, GN = layer.heads * layer.head_dim, layer.d_state, layer.groups * layer.d_state

    def seconds(Q: int) -> float:
        return (2 * Q * (HP + GN) + 4 * HP * N) / FLOPS + 8 * HP * N / (Q * MEMORY)

    return min(CHUNKS, key=seconds)


def advise(
    source: Source, *, gpus: int, memory: int, seq: int, batch: int | None = None,
    step: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """Which of dp, tp, cp, sp and recomputation trains a model, as plain data.

    Args:
        source: the model; only its configuration is read. gpus: how many. memory: bytes of each.
        seq: tokens a row. batch: rows of a step over all GPUs; one a GPU by default.

    Returns:
        "one_gpu": bytes of a step of one row on one GPU without recomputation, and whether that is enough. "best": the
        choice with the least time of those that fit (None if none does), "others": the next ones, "refused": why
        degrees were left out, "chunk": the chunk length, "formulas", "assumed". Sizes are bytes.

    Raises:
        PipelineError, RefusedError, CheckpointError, CaptureError: bad input.
    """
    rows = gpus if batch is None else batch
    step("tracing a step")
    model = source.on_meta().to(torch.bfloat16)
    parameters = sum(p.numel() for p in model.parameters())
    steps = {False: traced_step(model, recompute=False)}
    layers = layers_of(steps[False].graph)
    step("tracing a step with recomputed layers")
    if getattr(model, "supports_gradient_checkpointing", False):
        steps[True] = traced_step(source.on_meta().to(torch.bfloat16), recompute=True)
    config = source.config.get_text_config(decoder=True)
    refused: dict[str, str] = {}
    found = []
    for dp, tp, cp in _degrees(gpus):
        why = _refusal(steps[False].graph, config, layers, dp, tp, cp, rows, seq)
        if why is not None:
            refused[f"dp={dp},tp={tp},cp={cp}"] = why
            continue
        for recompute, traced in steps.items():
            found.append(_choice(traced, config, layers, parameters, (dp, tp, cp), recompute, rows, seq, gpus))
    if not found:
        why = "; ".join(f"{mesh}: {reason}" for mesh, reason in list(refused.items())[:4])
        raise PipelineError(
            f"no way to share {rows} rows of {seq} tokens over {gpus} GPUs: {why}",
            remedy="give a number of rows (--batch) or tokens (--seq) that GPUs divide, or another number of GPUs",
        )
    fitting = sorted((c for c in found if c.total <= memory), key=lambda c: (c.seconds, c.total))
    least = min(found, key=lambda c: c.total)
    alone = _choice(steps[False], config, layers, parameters, (1, 1, 1), False, 1, seq, 1)
    return {
        "schema": SCHEMA,
        "latentscan": __version__,
        "model": {"name": source.text, "parameters": parameters, "layers": config.num_hidden_layers},
        "gpus": gpus, "memory": memory, "seq": seq, "batch": rows,
        "one_gpu": {**_told(alone), "enough": alone.total <= memory},
        "best": _told(fitting[0]) if fitting else None,
        "others": [_told(c) for c in fitting[1:5]],
        "least": _told(least),
        "refused": refused,
        "chunk": {f"{x.heads} x {x.head_dim} x {x.d_state}": chunk_length(x) for x in dict.fromkeys(layers.values())},
        "formulas": dict(FORMULAS),
        "assumed": {"flops": FLOPS, "link": LINK, "memory": MEMORY},
    }  # fmt: skip


def _told(choice: Choice) -> dict[str, Any]:
    passes = [n for n, yes in (("tensor-parallel", choice.tp > 1), ("sequence-parallel", choice.sp)) if yes]
    mesh = ",".join(f"{n}={getattr(choice, n)}" for n in ("dp", "tp", "cp") if getattr(choice, n) > 1)
    return {**asdict(choice), "total": choice.total, "mesh": mesh, "passes": passes}


def _degrees(gpus: int) -> list[tuple[int, int, int]]:
    divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
    return [(gpus // (tp * cp), tp, cp) for tp in divisors for cp in divisors if gpus % (tp * cp) == 0]


def _refusal(
    graph: Graph, config: Any, layers: dict[str, Layer], dp: int, tp: int, cp: int, rows: int, seq: int
) -> str | None:
    if rows % dp:
        return f"{rows} rows over dp={dp}"
    if seq % cp:
        return f"{seq} tokens over cp={cp}"
    if cp > 1 and seq == cp:
        return "a shard of one token"
    for layer in layers.values():
        if layer.heads % tp:
            return f"{layer.heads} Mamba heads over tp={tp}"
        if cp > 1 and seq // cp < layer.conv - 1:
            return f"a shard of {seq // cp} tokens is shorter than {layer.conv - 1}"
    scans = graph.calls(ssm.chunk_scan.op)
    attends = any(n.target._opname in ("attention", "latent_attention") for n in graph.nodes if _ours(n))
    heads = int(getattr(config, "num_attention_heads", 0) or 0)
    if attends and heads % (tp * cp):
        return f"{heads} attention heads over tp x cp = {tp * cp}"
    kv_heads = max(1, int(getattr(config, "num_key_value_heads", None) or heads) // tp)
    if attends and kv_heads % cp and cp % kv_heads:
        return f"{kv_heads} KV heads over cp={cp}"
    if cp > 1 and not scans and not attends:
        return "no layer that context parallelism serves"
    return None


def _ours(node: Any) -> bool:
    return getattr(node.target, "namespace", "") == "latentscan"


def _choice(
    traced: _Step, config: Any, layers: dict[str, Layer], parameters: int, degrees: tuple[int, int, int],
    recompute: bool, rows: int, seq: int, gpus: int,
) -> Choice:  # fmt: skip
    dp, tp, cp = degrees
    mine, tokens, ranks = rows // dp, seq // cp, dp * cp
    sent = 4 * parameters * (ranks - 1) // (ranks * tp)
    if tp > 1:
        sent += 8 * config.num_hidden_layers * mine * tokens * config.hidden_size * 2 * (tp - 1) // tp
    if cp > 1:
        for layer in layers.values():
            states = layer.states(cp, mine, cheaper(cp)) // tp
            hidden = 2 * mine * tokens * config.hidden_size * layer.heads * layer.head_dim / tp / FLOPS * LINK
            sent += 2 * int(max(0.0, states - hidden))
        if not layers:
            sent += 8 * config.num_hidden_layers * mine * tokens * config.hidden_size * 2 * (cp - 1) // cp
    activations = traced.kept(mine, tokens) // tp
    return Choice(
        dp, tp, cp, tp > 1, recompute, 2 * parameters // tp, 2 * parameters // tp,
        math.ceil(4 * parameters / (ranks * tp)), math.ceil(8 * parameters / (ranks * tp)), activations, sent,
        traced.flops(rows, seq) / (gpus * FLOPS) + sent / LINK,
    )  # fmt: skip


def show(data: dict[str, Any], console: Any) -> None:
    """The advice for people."""
    from rich.table import Table

    from latentscan.tools.plan_text import bytes_text

    def line(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    model, alone = data["model"], data["one_gpu"]
    line(
        f"{model['name']}: {model['parameters']:,} parameters, {model['layers']} layers; {data['batch']} rows of "
        f"{data['seq']:,} tokens on {data['gpus']} GPUs of {bytes_text(data['memory'])}"
    )
    verdict = "one GPU is enough" if alone["enough"] else "one GPU is not enough"
    line(f"{verdict}: a row takes {bytes_text(alone['total'])} there, without recomputation")
    best = data["best"]
    if best is None:
        least = data["least"]
        line(f"nothing fits; the least is {bytes_text(least['total'])} with {least['mesh'] or 'one rank'}, recomputed")
    else:
        passes = f" with {', '.join(best['passes'])}" if best["passes"] else ""
        line(f"advice: {best['mesh'] or 'one rank'}{passes}, {'full' if best['recompute'] else 'no'} recomputation")
    columns = ("weights", "gradients", "master", "optimizer", "activations", "total", "sent")
    table = Table(title="bytes of a rank")
    for name in ("dp", "tp", "cp", "sp", "recompute", *columns, "ms"):
        table.add_column(name, justify="right")
    for row in [r for r in (best, *data["others"]) if r is not None] or [data["least"]]:
        table.add_row(
            str(row["dp"]), str(row["tp"]), str(row["cp"]), "yes" if row["sp"] else "no",
            "full" if row["recompute"] else "none", *(bytes_text(row[c]) for c in columns),
            f"{row['seconds'] * 1e3:.4g}",
        )  # fmt: skip
    console.print(table)
    for shape, length in data["chunk"].items():
        line(f"chunk length {length} for scans of {shape} (heads x head_dim x d_state)")
    for name, text in data["formulas"].items():
        line(f"{name}: {text}")
    assumed = data["assumed"]
    line(
        f"taken for a GPU: {assumed['flops'] / 1e12:.0f} TFLOP/s, links of {assumed['link'] / 1e9:.0f} GB/s, memory of "
        f"{assumed['memory'] / 1e12:.1f} TB/s. P parameters, B rows, S tokens, D hidden, N GPUs"
    )
