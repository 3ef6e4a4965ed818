"""Wrapped models on disk: Hugging Face's files, and ``latentscan.json`` that says how they were rewritten.

Where every rewrite has an inverse the weights are saved under their original names, so that plain transformers reads
the directory too; ``load`` then rewrites them again. Other new weights are saved under their own names and read as
they are.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import re
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from latentscan import __version__
from latentscan.ir.errors import CheckpointError, LatentscanError, MeshError
from latentscan.ir.frontends import register_all
from latentscan.ir.mesh import Mesh
from latentscan.ir.weights import Recipe
from latentscan.passes.base import Context
from latentscan.passes.pipeline import Program, parse, run, to_text
from latentscan.runtime.atomic import check_writable, files_in, replaced_directory
from latentscan.runtime.door import install
from latentscan.runtime.materialise import materialise
from latentscan.runtime.mesh import PARALLEL, SEQUENCE, bind_mesh, check_alike, device_for, one_writes
from latentscan.runtime.options import Options
from latentscan.runtime.own import SaveHook, bury, get, make_parameters, place, release, tombstone
from latentscan.runtime.plan import ModelPlan
from latentscan.runtime.session import Session
from latentscan.runtime.source import MARKER, one_line, quiet
from latentscan.runtime.stored import INDEX, SINGLE, Stored
from latentscan.runtime.tiny import choose_experts
from latentscan.runtime.wrap import plan_of, planning_graph

FORMAT = 1  # of latentscan.json; raised when an older latentscan could not read it
_OURS = re.compile(
    r"(model.*\.safetensors(\.index\.json)?|latentscan(-heal)?\.json|latentscan-heal\.(safetensors|png))"
)
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


# -- saving -----------------------------------------------------------------------------------------------------------


def save(session: Session, directory: Any, *args: Any, **kwargs: Any) -> None:
    """``model.save_pretrained(directory, ...)`` of a wrapped model, with Hugging Face's arguments.

    The directory appears complete or not at all; the model files of an earlier save are replaced, and other files in it
    stay. (``latentscan.json`` names all files that latentscan wrote: the next conversion to it replaces its tokenizer.)

    Raises:
        CheckpointError: the directory holds a model that latentscan did not save, or cannot be written.
    """
    write(session, directory, None, *args, **kwargs)


def write(session: Session, directory: Any, extra: Callable[[Path], None] | None, *args: Any, **kwargs: Any) -> None:
    """:func:`save`, with a function that may put more files into the directory before it appears.

    With it every file that latentscan wrote there before goes; the user's own stay.
    """
    model = session.model
    theirs = type(model).save_pretrained
    given = inspect.signature(theirs).bind(model, directory, *args, **kwargs).arguments
    if not given.get("is_main_process", True) and session.mesh is None:
        return
    if given.get("push_to_hub"):
        raise CheckpointError(
            "push_to_hub is not served", where=str(directory), remedy="save, then upload the directory"
        )
    if session.mesh is not None:  # every rank comes here; the first one writes, all end alike
        kwargs = {**kwargs, "state_dict": gathered_state(session), "is_main_process": True}
        with one_writes(session.mesh) as mine:
            if mine:
                _write(session, directory, extra, *args, **kwargs)
        return
    _write(session, directory, extra, *args, **kwargs)


def _write(session: Session, directory: Any, extra: Callable[[Path], None] | None, *args: Any, **kwargs: Any) -> None:
    model, theirs = session.model, type(session.model).save_pretrained
    target = check_target(directory)
    if any(r.inverse is None for r in session.plan.recipes):
        warnings.warn(
            f"{target} is for latentscan.load only: plain transformers would start its keys and values at random",
            stacklevel=3,
        )
    earlier = written_files(target)
    kept = frozenset() if extra is not None else earlier  # a tokenizer, say, that a conversion wrote beside the model

    def keep(name: str) -> bool:
        return _OURS.fullmatch(name) is None and (name in kept or name not in earlier)

    with replaced_directory(target, keep) as aside:
        with quiet():
            theirs(model, str(aside), *args, **kwargs)
        if extra is not None:
            extra(aside)
        written = {*files_in(aside), *(name for name in kept if keep(name)), MARKER}
        text = json.dumps(_description(session) | {"files": sorted(written)}, indent=2, sort_keys=True)
        (aside / MARKER).write_text(text + "\n", encoding="utf-8")


def check_target(directory: Any) -> Path:
    """Where a model may be saved.

    Raises:
        CheckpointError: a file, a directory that holds a model which latentscan did not save, or a place that cannot be
        written.
    """
    target = Path(directory)
    check_writable(target)
    if target.exists() and not target.is_dir():
        raise CheckpointError("is a file", where=str(target), remedy="give a directory")
    if target.is_dir() and not (target / MARKER).is_file():
        if foreign := sorted(p.name for p in target.iterdir() if p.name == "config.json" or _OURS.fullmatch(p.name)):
            raise CheckpointError(
                f"holds a model that latentscan did not save ({foreign[0]}), and would be overwritten",
                where=str(target),
                remedy="give another directory",
            )
    return target


def _description(session: Session) -> dict[str, Any]:
    import transformers

    told: dict[str, Any] = {"source": session.source} if session.source else {}
    return told | {
        "format": FORMAT,
        "latentscan": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "class": type(session.model).__name__,
        "plan": unsharded(session.plan).to_json(),
        "reads_as_plain_model": all(r.inverse is not None for r in session.plan.recipes),
    }


def gathered_state(session: Session) -> dict[str, torch.Tensor]:
    """The state dict of the whole model. Every rank of the mesh must call it."""
    state = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in session.model.state_dict().items()}
    for recipe in reversed([r for r in session.plan.recipes if r.group]):
        if not any(t in state for t in recipe.targets):  # parts of buffers, which the model makes anew
            continue
        parts = [state.pop(t) for t in recipe.targets]
        with torch.no_grad():
            state.update(zip(recipe.sources, recipe.inverse(*parts), strict=True))  # type: ignore[misc]
    SaveHook(session.plan.recipes, session.plan.released)(session.model, state, "", {})
    return state


def unsharded(plan: ModelPlan) -> ModelPlan:
    """The plan as it would be in one process: what is saved is whole."""
    over_ranks = PARALLEL + SEQUENCE
    passes = [p for p in parse(plan.pipeline) if p.name not in over_ranks]
    facts = {key: facts for key, facts in plan.facts.items() if key[0] not in over_ranks}
    recipes = tuple(r for r in plan.recipes if not r.group)
    sources = {s for r in recipes for s in r.sources}
    parted = {s for r in plan.recipes if r.group for s in r.sources}  # which whole graphs read
    released = tuple(path for path in plan.released if path in sources - parted)
    return ModelPlan(to_text(passes), facts, recipes, released)


def written_files(folder: Path) -> frozenset[str]:
    """The files of a directory that latentscan wrote, as it says; a conversion replaces these, and no others."""
    try:
        told = json.loads((folder / MARKER).read_text(encoding="utf-8"))["files"]
        return frozenset(name for name in told if isinstance(name, str))
    except (OSError, ValueError, KeyError, TypeError):  # none, or one of a save that did not say
        return frozenset()


# -- loading ----------------------------------------------------------------------------------------------------------


def load(
    directory: Any, *, mesh: Any = None, parallel: str = "tensor-parallel", target: str = "auto", inductor: Any = "auto"
) -> torch.nn.Module:
    """A wrapped model from a directory that a wrapped model's ``save_pretrained`` (or ``convert``) wrote.

    Weights are read once, straight to their places; what the directory holds in rewritten form is not made again.

    Args:
        mesh: as in :func:`latentscan.wrap`; each rank then reads its part only.
        parallel: with a mesh: the passes that split over it, which are added to those of the directory.
        target, inductor: as in :func:`latentscan.wrap`.

    Returns:
        the wrapped model in evaluation mode, in the dtype that it was saved in.

    Raises:
        MeshError: the mesh does not fit the ranks or the model.
        CheckpointError: the directory is missing, incomplete, damaged, of a newer latentscan, or does not fit the plan
        that this version makes for the model.
    """
    folder = Path(directory)
    told = read_description(folder)
    stored = tensors_in(folder)
    words = ",".join(w for w in (told["plan"]["pipeline"], parallel if mesh is not None else "") if w)
    options = Options.of({"pipeline": words, "target": target, "inductor": inductor, "mesh": mesh})
    kind, config = _kind_and_config(folder, told)
    if mesh is not None:
        return _load_parts(folder, told, stored, kind, config, options)
    plan, values = _plan_again(folder, told, _skeleton(folder, kind, config), options)
    kept = _kept(folder, plan, stored)
    again = tuple(r for r in plan.recipes if r not in kept)
    model = _read(folder, kind, config, kept, plan, values)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if stored.get(name, tensor.dtype) != tensor.dtype:  # the library keeps some in fp32 whatever was saved
            tensor.data = tensor.data.to(stored[name])
    for recipe in again:  # one after the other, so that no more than one layer is held twice
        make_parameters(model, [recipe])
        release(model, [s for s in recipe.sources if s in plan.released])
    choose_experts(model)
    session = Session(model, parse(options.pipeline), plan, options)
    session.source = told.get("source")
    install(model, session)
    return model.eval()


def _kept(folder: Path, plan: ModelPlan, stored: dict[str, torch.dtype]) -> tuple[Recipe, ...]:
    """The recipes whose results are stored; those of the others must be such as can be made again."""
    kept = tuple(r for r in plan.recipes if not r.group and all(t in stored for t in r.targets))
    for recipe in plan.recipes:
        if recipe not in kept and recipe.inverse is None:
            gone = sorted(t for t in recipe.targets if t not in stored)
            raise CheckpointError(f"lacks the weight {gone[0]}", where=str(folder), remedy="convert the model again")
    return kept


def _load_parts(
    folder: Path, told: dict[str, Any], stored: dict[str, torch.dtype], kind: Any, config: Any, options: Options
) -> torch.nn.Module:
    """The model as a rank of a mesh holds it."""
    model = _skeleton(folder, kind, config)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        tensor.data = tensor.data.to(stored.get(name, tensor.dtype))
    mesh = bind_mesh(options.mesh, model)
    assert mesh is not None
    check_alike(mesh, model, options.pipeline)
    plan, values = _plan_again(folder, told, model, options, mesh)
    new = {
        path: torch.empty(tuple(values[path].shape), dtype=stored[path], device="meta")
        for recipe in _kept(folder, plan, stored)
        for path in recipe.targets
    }
    with contextlib.closing(Stored(folder, model, new)) as files:
        materialise(model, plan, files, device_for(options.mesh, model), new)
    if (folder / "generation_config.json").is_file():
        model.generation_config = type(model.generation_config).from_pretrained(str(folder))
    session = Session(model, parse(options.pipeline), plan, options, mesh)
    session.source = told.get("source")
    install(model, session)
    return model


def read_description(folder: Path) -> dict[str, Any]:
    """What ``latentscan.json`` says. Raises CheckpointError."""
    path = folder / MARKER
    if not folder.is_dir():
        raise CheckpointError("there is no such directory", where=str(folder), remedy="give what save_pretrained wrote")
    if not path.is_file():
        raise CheckpointError(
            f"holds no {MARKER}: no wrapped model was saved here", where=str(folder),
            remedy="read it with transformers, then wrap it",
        )  # fmt: skip
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        version = told["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"cannot be read: {one_line(error)}", where=str(path), remedy="convert the model again"
        ) from None
    if not isinstance(version, int) or version > FORMAT:
        raise CheckpointError(
            f"has format {version}, this latentscan ({__version__}) reads up to {FORMAT}", where=str(path),
            remedy=f"install latentscan {told.get('latentscan', '')} or newer",
        )  # fmt: skip
    try:
        _facts(told["plan"]), str(told["plan"]["pipeline"]), str(told["class"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"is incomplete: {type(error).__name__}: {error}", where=str(path), remedy="convert the model again"
        ) from None
    return told


def tensors_in(folder: Path) -> dict[str, torch.dtype]:
    """The names of the tensors in a directory's safetensors files, and their types. Reads headers only.

    Raises:
        CheckpointError: a file is missing, truncated or not of this format.
    """
    files = [folder / SINGLE]
    if (index := folder / INDEX).is_file():
        try:
            files = [
                folder / name
                for name in sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            ]
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(
                f"cannot be read: {one_line(error)}", where=str(index), remedy="copy the directory again"
            ) from None
    return {name: dtype for path in files for name, dtype in _header(path).items()}


def _header(path: Path) -> dict[str, torch.dtype]:
    """The tensors of one safetensors file: 8 bytes of length, that many bytes of JSON, then the data."""
    if not path.is_file():
        raise CheckpointError("is missing", where=str(path), remedy="copy the directory again")
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            head = file.read(min(length, 1 << 28))
        parts = json.loads(head)
        parts.pop("__metadata__", None)
        end = 8 + length + max((part["data_offsets"][1] for part in parts.values()), default=0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise CheckpointError(
            f"is damaged: {one_line(error)}", where=str(path), remedy="copy the directory again"
        ) from None
    if (size := path.stat().st_size) != end:
        raise CheckpointError(f"has {size} bytes instead of {end}", where=str(path), remedy="copy the directory again")
    return {name: _DTYPES[part["dtype"]] for name, part in parts.items() if part["dtype"] in _DTYPES}


def _kind_and_config(folder: Path, told: dict[str, Any]) -> tuple[Any, Any]:
    import transformers

    kind = getattr(transformers, told["class"], None)
    if kind is None:
        raise CheckpointError(
            f"transformers {transformers.__version__} has no {told['class']}", where=str(folder),
            remedy=f"install transformers {told.get('transformers', '')}",
        )  # fmt: skip
    if not (folder / "config.json").is_file():  # the library would take its defaults
        raise CheckpointError("is missing", where=str(folder / "config.json"), remedy="copy the directory again")
    try:
        with quiet():
            return kind, kind.config_class.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # noqa: BLE001  json, validation and library errors of many types
        raise CheckpointError(
            f"cannot be read: {one_line(error)}", where=str(folder / "config.json"), remedy="copy the directory again"
        ) from None


def _facts(plan: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(site["pass"], site["module"]): dict(site["facts"]) for site in plan["sites"]}


def _skeleton(folder: Path, kind: Any, config: Any) -> Any:
    """The model in evaluation mode on the meta device."""
    try:
        with quiet(), torch.device("meta"):
            model = kind._from_config(config).eval()
    except Exception as error:
        raise CheckpointError(
            f"the configuration makes no model: {type(error).__name__}: {one_line(error)}", where=str(folder),
            remedy="copy the directory again",
        ) from error  # fmt: skip
    choose_experts(model)
    return model


def _plan_again(
    folder: Path, told: dict[str, Any], skeleton: torch.nn.Module, options: Options, mesh: Mesh | None = None
) -> tuple[ModelPlan, dict[str, torch.Tensor]]:
    """The plan, made on the meta device with the stored decisions, and the fake values of the new weights."""
    register_all()
    passes = parse(options.pipeline)
    try:
        context = Context(facts=_facts(told["plan"]), own_parameters=True, meta=True, mesh=mesh)
        cached = not any(p.name in SEQUENCE for p in passes)
        program = run(planning_graph(skeleton, cached=cached), passes, context)
        plan = plan_of(program, to_text(passes))
    except (CheckpointError, MeshError):
        raise
    except LatentscanError as error:
        raise CheckpointError(
            f"this version cannot make the stored plan: {error}",
            where=str(folder / MARKER),
            remedy="convert the model again",
        ) from error
    have = json.loads(json.dumps(unsharded(plan).to_json()))
    if have != told["plan"]:
        raise CheckpointError(
            f"the stored plan is not the one made now: {_difference(told['plan'], have)}", where=str(folder / MARKER),
            remedy=f"convert the model again, or read it with latentscan {told.get('latentscan', '')} and "
            f"transformers {told.get('transformers', '')}",
        )  # fmt: skip
    return plan, _new_values(program)


def _new_values(program: Program) -> dict[str, torch.Tensor]:
    forms = [program] if program.choice is None else [program.forced(True), program.forced(False)]
    return {a.path: f.graph.weights[a.placeholder].value for f in forms if f.graph is not None for a in f.graph.added}


def _difference(stored: Any, made: Any, where: str = "plan") -> str:
    """The first place where two plain values differ."""
    if isinstance(stored, dict) and isinstance(made, dict):
        for key in sorted({*stored, *made}):
            if stored.get(key) != made.get(key):
                return _difference(stored.get(key), made.get(key), f"{where}.{key}")
    if isinstance(stored, list) and isinstance(made, list):
        for index, (a, b) in enumerate(zip(stored, made, strict=False)):
            if a != b:
                return _difference(a, b, f"{where}[{index}]")
        return f"{where} has {len(stored)} entries, now {len(made)}"
    return f"{where} is {json.dumps(stored)[:120]}, now {json.dumps(made)[:120]}"


def _read(
    folder: Path, kind: Any, config: Any, kept: tuple[Recipe, ...], plan: ModelPlan, values: dict[str, torch.Tensor]
) -> torch.nn.Module:
    """The Hugging Face model with the weights of ``kept`` in place of their sources.

    Its own ``from_pretrained`` reads the files, into a class whose models are born on the meta device in their
    rewritten form.
    """
    gone = {s: r.targets[0] for r in kept for s in r.sources if s in plan.released}
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}  # and a new weight of the same type and place

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, *args, **kwargs)
        for recipe in kept:
            for path in recipe.targets:
                module, name = place(self, path)
                like = values[path]
                made = torch.empty(tuple(like.shape), dtype=torch.get_default_dtype(), device="meta")
                module.register_parameter(name, torch.nn.Parameter(made))
        tied = getattr(self, "all_tied_weights_keys", {})
        names = gone | {alias: gone[path] for alias, path in tied.items() if path in gone}
        for path, made_from in names.items():
            tied.pop(path, None)
            module, name = place(self, path)
            shapes[path] = tuple(module._parameters.pop(name).shape), made_from
            module._is_hf_initialized = True  # nothing is left in it to initialise

    born = type(kind.__name__, (kind,), {"__init__": __init__, "__module__": kind.__module__})
    try:
        with quiet():
            model, info = born.from_pretrained(  # type: ignore[attr-defined]
                str(folder), config=config, dtype="auto", local_files_only=True, output_loading_info=True
            )
    except Exception as error:
        raise CheckpointError(
            f"the weights cannot be read: {type(error).__name__}: {one_line(error)}", where=str(folder),
            remedy="copy the directory again",
        ) from error  # fmt: skip
    for problem, what in (
        ("missing_keys", "lacks"),
        ("unexpected_keys", "holds unknown"),
        ("mismatched_keys", "has odd shapes in"),
    ):
        if info[problem]:
            found = sorted(map(str, info[problem]))
            raise CheckpointError(
                f"{what} {len(found)} weights, {found[0]} first", where=str(folder), remedy="convert the model again"
            )
    model.__class__ = kind
    for path, (shape, like) in shapes.items():
        new = get(model, like)
        bury(model, path, tombstone(shape, new.dtype, new.device))
    return model


__all__ = ["FORMAT", "check_target", "load", "read_description", "save", "tensors_in", "write"]
