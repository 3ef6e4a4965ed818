"""Canonical ops -> kernels of a target. A target is a table; targets that come later add theirs."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable
from typing import Any

from torch import fx

from latentscan.ir.errors import PipelineError
from latentscan.ir.graph import Graph
from latentscan.ir.ops.state_exchange import scan_enter, scan_leave
from latentscan.ir.sizes import same

# target -> module whose ``KERNELS`` maps an op's name to ``lower(graph, node) -> new node or None``
TARGETS: dict[str, str] = {
    "reference": "latentscan.lowering.reference",
    "triton": "latentscan.lowering.triton",
    "ascend": "latentscan.lowering.ascend",
}

TRITON = importlib.util.find_spec("triton") is not None

_LOWER = re.compile(r"(^|,)\s*lower\s*(?:\{([^{}]*)\})?\s*$")

Lowering = Callable[[Graph, fx.Node], "fx.Node | None"]


def split_target(pipeline: str, target: str = "auto") -> tuple[str, str]:
    """(the passes, the target) of a pipeline that may end with ``lower{target=NAME}``, the last step of every run.

    Args:
        target: what was asked for beside the pipeline.

    Raises:
        PipelineError: no target or another option in the braces, an unknown target, or two that differ.
    """
    match = _LOWER.search(pipeline)
    if match is None:
        return pipeline, target
    options = [part.partition("=") for part in (match[2] or "").split(",") if part.strip()]
    given = {key.strip(): value.strip() for key, _, value in options}
    if set(given) != {"target"} or len(options) != 1:
        raise PipelineError(
            f"lower takes one option, target, and is given {match[2] or 'none'}", remedy="write lower{target=NAME}"
        )
    named = given["target"]
    if named != "auto" and named not in TARGETS:
        raise PipelineError(f"there is no target {named!r}", remedy=f"use one of: auto, {', '.join(TARGETS)}")
    if "auto" not in (target, named) and target != named:
        raise PipelineError(
            f"the pipeline ends with lower{{target={named}}}, and target={target} is given", remedy="name one target"
        )
    return pipeline[: match.start()], named if target == "auto" else target


def resolve_target(target: str, device: Any = None) -> str:
    """The target that a name stands for on a device type (None: not known yet); ``auto`` takes the best there is.

    Raises:
        PipelineError: unknown target, or one that the device cannot run.
    """
    if target == "auto" and device == "npu":
        from latentscan.lowering.npu import missing

        return "reference" if missing() else "ascend"
    if target == "auto":
        return "triton" if device == "cuda" and TRITON else "reference"
    if target not in TARGETS:
        raise PipelineError(
            f"there is no lowering to target {target!r} yet", remedy=f"use one of: auto, {', '.join(TARGETS)}"
        )
    if target == "ascend":
        from latentscan.lowering.npu import require

        require(device)
    if target == "triton" and not TRITON:
        raise PipelineError("target=triton needs Triton, which is not installed", remedy="install triton")
    if target == "triton" and device not in (None, "cuda"):
        where = f"target=triton needs a CUDA device, and the model is on {device}"
        raise PipelineError(where, remedy="use target=auto or move the model")
    return target


def lower(graph: Graph, target: str, tiles: Any = None) -> dict[str, int]:
    """Replace canonical ops by the target's kernels, in place.

    Args:
        tiles: a user's table of tiles for kernels that take one, or None.

    Returns:
        op name -> how many were given a kernel. Ops without one keep their reference implementation.
    """
    table: dict[str, Lowering] = importlib.import_module(TARGETS[target]).KERNELS
    done: dict[str, int] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if getattr(node.target, "namespace", "") != "latentscan" and node.target not in (scan_enter, scan_leave):
            continue
        name = getattr(node.target, "_opname", getattr(node.target, "__name__", ""))
        rule = table.get(name)
        with graph.before(node, f"lower{{target={target}}}"):
            new = rule(graph, node) if rule else None
        if new is not None:
            if tiles is not None:
                from latentscan.lowering.tiles import give_tiles

                give_tiles(graph, new, tiles)
            graph.replace(node, new)
            graph.graph.erase_node(node)
            done[name] = done.get(name, 0) + 1
    graph.module.recompile()
    return done


def length_flags(graph: Graph, queries: Any, keys: Any) -> dict[str, bool]:
    """``square``: as many queries as keys on every run; ``single``: one query on every run."""
    return {"square": same(queries, keys), "single": isinstance(queries, int) and queries == 1}
