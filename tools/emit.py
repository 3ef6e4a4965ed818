"""``latentscan emit``: what a model needs on an Ascend NPU as a folder: graph, kernels, tilings and build script.

Nothing is computed and no NPU is needed: the model is traced without weights. No NPU binary is made.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import fx

from latentscan import __version__
from latentscan.ir.errors import CheckpointError, PipelineError
from latentscan.ir.graph import Graph, module_path
from latentscan.ir.printer import text as graph_text
from latentscan.kernels.ascendc import emit as ascendc
from latentscan.kernels.triton_ascend.tiles import CHIPS, backward_tiles, chunk_tiles, decode_tiles, update_tile
from latentscan.lowering import ascend
from latentscan.lowering.select import lower
from latentscan.passes.base import Context
from latentscan.passes.pipeline import parse, run, to_text
from latentscan.runtime.atomic import check_writable, replaced_directory
from latentscan.runtime.phases import traced_phases
from latentscan.runtime.source import Source

MARKER = "latentscan-emit.json"
SCHEMA = 1
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
TRITON = Path(__file__).parents[1] / "kernels" / "triton_ascend"
NOTE = "No NPU binary was produced, and nothing of this has run on an NPU."


def check_out(out: Path) -> None:
    """Raise unless ``out`` does not exist or is a folder that emit made.

    Raises:
        CheckpointError: it is neither, or cannot be written.
    """
    check_writable(out.absolute())
    if (out.exists() or out.is_symlink()) and (out.is_symlink() or not (out / MARKER).is_file()):
        raise CheckpointError(
            "exists and was not made by emit, so it is left alone",
            where=str(out),
            remedy="name a folder that does not exist yet, or remove this one yourself",
        )


def emit(
    source: Source, out: Path, *, pipeline: str = "", batch: int = 1, seq: int = 32768, train: bool = False,
    chip: str = "910B3", dtype: str = "", step: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """Write the folder, whole or not at all.

    Args:
        pipeline: passes that come before the lowering. batch, seq: what the number of launches is counted for.
        chip: whose tiles are chosen. dtype: float16 or bfloat16; by default the model's, or float16 if that is neither.

    Returns:
        what the folder's ``latentscan-emit.json`` holds.

    Raises:
        PipelineError: unknown chip or dtype. CheckpointError: the folder is not ours. What planning raises.
    """
    if chip not in CHIPS:
        raise PipelineError(f"there is no chip {chip!r}", remedy=f"use one of {', '.join(CHIPS)}")
    if dtype and dtype not in DTYPES:
        raise PipelineError(f"dtype {dtype!r} is none of {', '.join(DTYPES)}", remedy="use one of them")
    check_out(out)
    passes = parse(pipeline)
    step("building the model on the meta device")
    model = source.on_meta()
    own = next(model.parameters()).dtype
    kind = DTYPES.get(dtype) or (own if own in DTYPES.values() else torch.float16)
    model = model.to(kind)
    sites: list[dict[str, Any]] = []
    graphs: dict[str, str] = {}
    step("tracing")
    for traced in traced_phases(model, batch=batch, seq=seq, train=train):
        program = run(traced.graph, passes, Context(own_parameters=True, meta=True), strict=False)
        phases = "-".join(phase.name for phase in traced.phases)
        forms = {phases: program}
        if program.choice is not None:
            forms = {f"{phases}-{form}": program.forced(form == "absorb") for form in ("absorb", "expand")}
        for name, form in forms.items():
            graph = form.graph
            assert graph is not None
            sites += [{"graph": name, **site} for site in _sites(graph, chip, batch, seq)]
            graphs[f"graph/{name}.txt"] = graph_text(graph) + "\n"
            lowered = graph.copy()
            lower(lowered, "ascend")
            graphs[f"graph/{name}-lowered.txt"] = graph_text(lowered) + "\n"
    shapes = _shapes(sites, chip, kind)
    index = {
        "schema": SCHEMA, "latentscan": __version__, "model": source.text, "pipeline": to_text(passes), "chip": chip,
        "dtype": str(kind).removeprefix("torch."), "batch": batch, "seq": seq, "train": train, "note": NOTE,
        "sites": sites, "ascendc": {name: asdict(shape) for name, shape in shapes.items()},
    }  # fmt: skip
    step("writing")
    with replaced_directory(out, keep=lambda _: False) as folder:
        for name, text in {**graphs, "README.md": _readme(index), "build.sh": BUILD}.items():
            _write(folder / name, text)
        (folder / "build.sh").chmod(0o755)
        for path in sorted(TRITON.glob("*.py")):
            if path.name != "control_kernels.py":
                _write(folder / "triton" / path.name, path.read_text(encoding="utf-8"))
        for name, shape in shapes.items():
            for file, text in ascendc.sources(shape).items():
                _write(folder / "ascendc" / name / file, text)
            plans = {
                "chunk_scan": ascendc.chunk_scan_plan(shape, batch, seq),
                "state_update": ascendc.state_update_plan(shape, batch),
            }
            for kernel, plan in plans.items():
                _write(folder / "ascendc" / name / f"{kernel}.json", json.dumps(plan.as_json(), indent=1) + "\n")
                (folder / "ascendc" / name / f"{kernel}.tiling").write_bytes(plan.tiling_bytes())
        _write(folder / "tilings.json", json.dumps(sites, indent=1) + "\n")
        _write(folder / MARKER, json.dumps(index, indent=1) + "\n")
    return index


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _sites(graph: Graph, chip: str, batch: int, seq: int) -> list[dict[str, Any]]:
    """Each canonical op that a kernel could serve: module, op, sizes, and its tiles or why it has none."""
    found = []
    for node in graph.nodes:
        if node.op != "call_function" or getattr(node.target, "namespace", "") != "latentscan":
            continue
        name = node.target._opname  # type: ignore[union-attr]
        if name not in ascend.KERNELS and name not in ascend.KERNEL_MODULES:
            continue
        found.append({"module": module_path(node), "op": name, **_tiling(graph, node, name, chip, batch, seq)})
    return found


def _tiling(graph: Graph, node: fx.Node, name: str, chip: str, batch: int, seq: int) -> dict[str, Any]:
    values = [graph.value(a) for a in node.args]  # type: ignore[arg-type]
    if name == "attention":
        return {"kernel": "torch_npu.npu_fusion_attention where it is present, else torch"}
    if reason := ascend.unserved(name, *values, chip=chip, **node.kwargs):
        return {"kernel": "reference", "why": reason}
    if name == "chunk_scan":
        (H, P), (G, N) = (map(int, values[i].shape[2:]) for i in (0, 3))
        forward, backward = chunk_tiles(P, N, chip), backward_tiles(P, N, chip)
        assert forward is not None and backward is not None
        units = batch * H * -(-seq // forward.chunk)
        return {
            "kernel": name, "options": _options(node, values), "sizes": {"H": H, "P": P, "G": G, "N": N},
            "forward": asdict(forward), "backward": asdict(backward),
            "bytes": {k: asdict(v) for k, v in {**forward.forward(), **backward.backward()}.items()},
            "units": units, "launches_of_scan": -(-units // 65535),
        }  # fmt: skip
    if name == "latent_attention":
        if values[1] is None or values[3] is None:
            return {"kernel": "reference", "why": "there is no rotary part"}
        C, R = int(values[2].shape[2]), int(values[3].shape[3])
        tiles = decode_tiles(C, R, chip)
        if tiles is None:
            return {"kernel": "reference", "why": f"latent {C} and rope_dim {R} fit no tile of {chip}"}
        kernel = "latent_decode for one query token, else torch"
        return {"kernel": kernel, "sizes": {"C": C, "R": R}, "tiles": asdict(tiles)}
    if name == "state_update":
        (H, P, N), G = (int(n) for n in values[0].shape[1:]), int(values[4].shape[1])
        sizes = {"H": H, "P": P, "G": G, "N": N}
        return {
            "kernel": name, "options": _options(node, values), "sizes": sizes, "channels": update_tile(P, N, chip),
            "rates": "per state" if values[3].dim() == 2 else "per head",
        }  # fmt: skip
    return {"kernel": name}


def _options(node: fx.Node, values: list[Any]) -> dict[str, Any]:
    """The constants of the AscendC sources: what is there, and how dt becomes a step."""
    first = 5 if len(values) > 5 and node.target._opname == "chunk_scan" else 6  # type: ignore[union-attr]
    D, z = (values[i] if i < len(values) else None for i in (first, first + 1))
    return {
        "has_d": D is not None,
        "has_z": z is not None,
        "softplus": bool(node.kwargs.get("dt_softplus")),
        "dt_min": float(node.kwargs.get("dt_min", 0.0)),  # type: ignore[arg-type]
        "dt_max": min(float(node.kwargs.get("dt_max", 3.0e38)), 3.0e38),  # type: ignore[arg-type]
    }


def _shapes(sites: list[dict[str, Any]], chip: str, dtype: torch.dtype) -> dict[str, ascendc.Shape]:
    """Folder name -> shape, for every shape of a scan that the AscendC templates take; each site is told why not."""
    found: dict[str, ascendc.Shape] = {}
    for site in sites:
        if site.get("kernel") not in ("chunk_scan", "state_update"):
            continue
        try:
            if chip != "910B3":
                raise ValueError(f"the AscendC templates are written for the 910B, not for {chip}")
            if dtype != torch.float16:
                raise ValueError(
                    f"the AscendC templates take float16, the model is {str(dtype).removeprefix('torch.')}"
                )
            if site.get("rates") == "per state":
                raise ValueError("the AscendC templates take one A a head, here it differs by state")
            shape = ascendc.Shape.choose(**site["sizes"], **site["options"])
        except ValueError as error:
            site["ascendc"] = f"not emitted: {error}"
            continue
        name = f"h{shape.H}-p{shape.P}-g{shape.G}-n{shape.N}-q{shape.Q}"
        name += "".join(f"-{k[-1]}" for k in ("has_d", "has_z") if getattr(shape, k))
        if found.get(name, shape) != shape:
            name += f"-{sum(other.startswith(name) for other in found)}"
        site["ascendc"] = name
        found[name] = shape
    return found


BUILD = """#!/usr/bin/env bash
# Builds the AscendC kernels on a machine with CANN. The Triton kernels need no build: triton-ascend compiles them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
if [ -z "${ASCEND_HOME_PATH:-}" ]; then
  echo "build.sh: CANN is not found: source its set_env.sh, or set ASCEND_HOME_PATH" >&2
  exit 2
fi
for kernels in ascendc/*/; do
  [ -e "$kernels/CMakeLists.txt" ] || continue
  cmake -S "$kernels" -B "$kernels/build" -DSOC_VERSION="${SOC_VERSION:-Ascend910B3}"
  cmake --build "$kernels/build" --parallel
done
"""


def _readme(index: dict[str, Any]) -> str:
    rows: dict[tuple[str, str, str], int] = {}
    for site in index["sites"]:
        told = [site["kernel"]] + ([site["why"]] if "why" in site else [])
        told += [f"AscendC {site['ascendc']}"] if site.get("ascendc", "").startswith("not") else []
        key = (site["graph"], site["op"], ": ".join(told))
        rows[key] = rows.get(key, 0) + 1
    table = "\n".join(f"| {graph} | {op} | {count} | {kernel} |" for (graph, op, kernel), count in rows.items())
    return f"""# {index["model"]} for Ascend {index["chip"]}

Made by latentscan {index["latentscan"]}. {NOTE} What was checked instead is told in its docs/ascend.md.

- `graph/`: the model after the passes, before and after the lowering.
- `triton/`: the Triton kernels and their host code, as in the package; `tilings.json`: every site with its tiles.
- `ascendc/`, if there is a scan that the templates take: its forward and the decode step as AscendC for each shape,
  with the plan of launches (JSON) and the tiling data (64-bit little-endian words) for batch {index["batch"]} and
  {index["seq"]} tokens.
- `build.sh`: builds the AscendC kernels where CANN is.

| graph | op | sites | kernel |
|---|---|---|---|
{table}
"""
