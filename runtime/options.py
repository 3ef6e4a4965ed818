"""The options of a run: one frozen, typed object that travels; there are no global switches."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from latentscan.ir.errors import PipelineError
from latentscan.ir.mesh import parse_mesh
from latentscan.passes.pipeline import nearest


@dataclass(frozen=True)
class Options:
    """What ``wrap`` and ``torch.compile(..., options={...})`` take.

    Attributes:
        pipeline: passes as text, such as ``latent-cache,mla-absorb``; empty: canonical form only. It may end with
            ``lower{target=NAME}``, which says the same as ``target``.
        target: ``auto``, ``reference``, ``triton`` or ``ascend``.
        inductor: ``auto`` (on for GPUs), ``on`` or ``off``: what compiles the rest of the graph.
        check: compare the numbers after every pass: False, True, or {pass name or "default": tolerance}.
        dump: folder for a dump of every pass, or None.
        calibration: text or tokens for passes that need statistics, or a ``runtime.calibration.Calibration`` of them.
        mesh: what parallel passes split over: text such as ``tp=2``, or a DeviceMesh with named axes.
        timeout: seconds that a rank waits for the others in a collective; None: what its process group was made with.
        weights: the directory that holds the weights of a model on the meta device.
        tiles: the file of a table of tiles for the chunk scan, as ``latentscan bench ssd --tune`` writes it, or None.
    """

    pipeline: str = ""
    target: str = "auto"
    inductor: str = "auto"
    check: Any = False
    dump: str | None = None
    calibration: Any = None
    mesh: Any = None
    timeout: float | None = None
    weights: Any = None
    tiles: Any = None

    @classmethod
    def of(cls, given: dict[str, Any] | None) -> Options:
        """Options from a dict; unknown names and wrong values are errors."""
        known = {f.name for f in dataclasses.fields(cls)}
        for name in given or {}:
            if name not in known:
                raise PipelineError(
                    f"there is no option {name!r}",
                    remedy=f"the options are {', '.join(sorted(known))}{nearest(name, known)}",
                )
        made = cls(**(given or {}))
        if isinstance(made.pipeline, str):
            from latentscan.lowering.select import split_target

            passes, target = split_target(made.pipeline, made.target)
            made = dataclasses.replace(made, pipeline=passes, target=target)
        made.validate()
        return made

    def validate(self) -> None:
        if not isinstance(self.pipeline, str):
            raise PipelineError(
                f"pipeline is a {type(self.pipeline).__name__}, not text", remedy="write pass{option=value},pass"
            )
        inductor = {True: "on", False: "off"}.get(self.inductor, self.inductor)  # type: ignore[call-overload]
        if inductor not in ("auto", "on", "off"):
            raise PipelineError(f"inductor={self.inductor!r} is not one of auto, on, off", remedy="use one of these")
        object.__setattr__(self, "inductor", inductor)
        if not isinstance(self.check, (bool, dict)):
            raise PipelineError(
                f"check={self.check!r} is neither a bool nor a dict", remedy="give True, False or tolerances"
            )
        if self.dump is not None and not isinstance(self.dump, (str, os.PathLike)):
            raise PipelineError(f"dump={self.dump!r} is not a folder's name", remedy="give a path")
        if self.weights is not None and not isinstance(self.weights, (str, os.PathLike)):
            raise PipelineError(f"weights={self.weights!r} is not a directory's name", remedy="give a path")
        if self.weights is not None and (self.check or self.dump):
            raise PipelineError(
                "check and dump compute with the weights of the whole model, which weights= is not to hold",
                remedy="check the pipeline in one process, on a model in memory",
            )
        if self.mesh is not None and self.check:
            raise PipelineError("check is not served with a mesh yet", remedy="check the pipeline in one process")
        if self.timeout is not None and not (isinstance(self.timeout, (int, float)) and self.timeout > 0):
            raise PipelineError(f"timeout={self.timeout!r} is no number of seconds", remedy="give one above 0, or None")
        if self.timeout is not None and self.mesh is None:
            raise PipelineError("timeout is given without a mesh", remedy="give a mesh such as tp=2, or leave it out")
        if isinstance(self.mesh, str):
            parse_mesh(self.mesh)
        if self.tiles is not None:
            from latentscan.lowering.tiles import tiles_at

            tiles_at(self.tiles)
        from latentscan.lowering.select import resolve_target

        resolve_target(self.target)

    def use_inductor(self, device_type: str) -> bool:
        return self.inductor == "on" or (self.inductor == "auto" and device_type == "cuda")
