"""Running a graph on seeded inputs, and how far two runs lie apart.

The planning graph is an ordinary fx graph: its canonical ops have torch implementations and its cache appends work on
a fresh cache, so it runs as it is, on the model's own tensors. Of every value only a sample is kept, so that a deep
model fits beside itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from latentscan.ir.arena import Arena, make_token
from latentscan.ir.errors import NumericsError
from latentscan.ir.graph import VALUE, Graph, module_path
from latentscan.ir.sizes import expression
from latentscan.passes.base import Tier
from latentscan.runtime.binding import recipes_of

SEED = 20240521
BATCH, LENGTH = 2, 13  # more than one row, an odd length; the traced sizes if the graph's guards exclude these
SAMPLE = 4096  # elements kept of a value inside the graph; outputs are kept whole
GRADIENT_SAMPLE = 65536  # elements kept of a parameter's gradient

# Rounding of a re-associated graph, as a multiple of (eps of the accumulation x sqrt(longest reduction) + eps of the
# dtype) x sqrt(rewritten sites), relative to max|reference| of each value. The families of tests/models.py with 2 to 30
# layers, and SmolLM2-135M, measure 0.05 to 1 of that unit in fp32 and bf16; one per cent on one head's weights is
# hundreds of units in fp32 (tests/runtime/test_inspection.py holds both sides).
SAFETY = 4.0

# Functions that pick: a tie within rounding may fall either way, and everything after it differs.
_PICKS = {"topk", "sort", "argsort", "argmax", "argmin"}
_PRODUCTS = {"linear", "matmul", "bmm", "einsum", "addmm", "baddbmm", "mm", "attention", "latent_attention"}


@dataclass(frozen=True)
class Sample:
    """What is kept of one value: some of its elements, always the same ones, and its largest magnitude."""

    elements: torch.Tensor
    largest: float
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, value: torch.Tensor, limit: int = SAMPLE) -> Sample:
        flat = value.detach().reshape(-1)
        finite = flat[torch.isfinite(flat)]
        largest = float(finite.abs().max()) if finite.numel() else 0.0
        if flat.numel() > limit:
            flat = flat[_positions(flat.numel(), limit).to(flat.device)]
        return cls(flat.cpu().clone(), largest, tuple(value.shape), value.dtype)

    def difference(self, other: Sample, *, scale: float = 0.0) -> float:
        """``max|self - other| / max(max|self|, scale)``; inf if form, infinities or NaNs differ."""
        if (self.shape, self.dtype) != (other.shape, other.dtype):
            return math.inf
        return relative(self.elements, other.elements, scale=max(self.largest, scale))


_POSITIONS: dict[tuple[int, int], torch.Tensor] = {}


def _positions(count: int, limit: int) -> torch.Tensor:
    if (count, limit) not in _POSITIONS:
        if len(_POSITIONS) > 64:
            _POSITIONS.clear()
        generator = torch.Generator().manual_seed(SEED)
        _POSITIONS[count, limit] = torch.randint(count, (limit,), generator=generator)
    return _POSITIONS[count, limit]


def relative(reference: torch.Tensor, value: torch.Tensor, *, scale: float) -> float:
    """``max|reference - value| / scale`` over the finite elements; inf if the others differ."""
    if reference.dtype.is_complex:
        reference, value = torch.view_as_real(reference), torch.view_as_real(value)
    a, b = reference.double(), value.double()
    finite = torch.isfinite(a)
    if not torch.equal(finite, torch.isfinite(b)):
        return math.inf
    if not torch.equal(a[~finite].nan_to_num(0.5), b[~finite].nan_to_num(0.5)):
        return math.inf
    difference = float((a - b)[finite].abs().max()) if finite.any() else 0.0
    if difference == 0.0:
        return 0.0
    return difference / scale if scale > 0 else math.inf


@dataclass(frozen=True)
class Run:
    """One run of a graph.

    Attributes:
        values: node name -> sample, in the order of execution (of a gradient run: parameter path -> gradient).
        modules: node name -> module path.
        outputs: name -> whole output, cache tokens left out.
        picks: node name -> (the call as text, its result), of functions that pick by comparing (experts, say).
    """

    values: dict[str, Sample]
    modules: dict[str, str]
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    picks: dict[str, tuple[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """How far one run lies from its reference.

    Attributes:
        error: worst ``max|difference| / max|reference|`` over all outputs and all values that both runs have.
        output_error: the same over the outputs alone.
        tolerance: what it was compared with, or None if it was only measured.
        node, module: the first value in the order of execution that exceeds the tolerance (the worst one if none does).
        modules: module path -> its worst error.
    """

    error: float
    output_error: float
    tolerance: float | None
    node: str
    module: str
    modules: dict[str, float]

    @property
    def failed(self) -> bool:
        return self.tolerance is not None and not self.error <= self.tolerance


def compare(reference: Run, run: Run, tolerance: float | None) -> Comparison:
    """Compare the outputs, and every value inside that both runs have under one name."""
    errors: dict[str, float] = {}
    for name, sample in reference.values.items():
        other = run.values.get(name)
        if other is not None and sample.shape == other.shape and sample.dtype == other.dtype:
            errors[name] = sample.difference(other)
    for name, whole in reference.outputs.items():
        own = run.outputs.get(name)
        if own is None or (own.shape, own.dtype) != (whole.shape, whole.dtype):
            error = math.inf
        elif not whole.is_floating_point() and not whole.is_complex():
            error = 0.0 if torch.equal(whole, own) else math.inf
        else:
            finite = whole[torch.isfinite(whole)]
            error = relative(whole, own, scale=float(finite.abs().max()) if finite.numel() else 0.0)
        errors[name] = max(errors.get(name, 0.0), error)
    return _comparison(errors, reference.modules, tolerance)


def compare_gradients(reference: Run, run: Run, tolerance: float | None) -> Comparison:
    """Compare the gradients of two backward runs.

    A gradient that is zero but for rounding (a key bias, which shifts all scores alike) is compared with the largest
    one of its module. The parameter named is the one that backward reaches first.
    """
    scales: dict[str, float] = {}
    for path, sample in reference.values.items():
        owner = path.rpartition(".")[0].rpartition(".")[0]
        scales[owner] = max(scales.get(owner, 0.0), sample.largest)
    errors = {}
    for path in reversed(reference.values):  # parameters are met in forward order
        other = run.values.get(path)
        scale = scales[path.rpartition(".")[0].rpartition(".")[0]]
        errors[path] = math.inf if other is None else reference.values[path].difference(other, scale=scale)
    return _comparison(errors, reference.modules, tolerance)


def _comparison(errors: dict[str, float], modules: dict[str, str], tolerance: float | None) -> Comparison:
    by_module: dict[str, float] = {}
    for name, error in errors.items():
        path = modules.get(name, "")
        by_module[path] = max(by_module.get(path, 0.0), error)
    error = max(errors.values(), default=0.0)
    over = [n for n, e in errors.items() if tolerance is not None and not e <= tolerance]
    node = over[0] if over else max(errors, key=lambda n: errors[n], default="")
    output_error = max((e for n, e in errors.items() if n.startswith("output ")), default=error)
    return Comparison(error, output_error, tolerance, node, modules.get(node, ""), by_module)


# -- tolerance ------------------------------------------------------------------------------------------------------


def default_tolerance(graph: Graph, tier: Tier, sites: int, sizes: dict[sympy.Symbol, int]) -> float | None:
    """How far a pass may move a value, relative to its largest magnitude; None: it is only measured.

    Args:
        graph: the graph before the pass.
        sites: how many places the pass rewrote; their roundings add up like independent errors.
        sizes: what the graph's shape symbols are in the check.
    """
    if tier is Tier.EXACT:
        return 0.0
    if tier is Tier.APPROXIMATE:
        return None
    dtype = compute_dtype(graph)
    accumulation = torch.float32 if torch.finfo(dtype).bits < 32 else dtype
    unit = torch.finfo(accumulation).eps * math.sqrt(longest_reduction(graph, sizes)) + torch.finfo(dtype).eps
    return SAFETY * unit * math.sqrt(max(sites, 1))


def compute_dtype(graph: Graph) -> torch.dtype:
    """The coarsest floating dtype among the graph's weights; fp32 if it has none."""
    found = {w.value.dtype for w in graph.weights.values() if w.value.is_floating_point() and w.value.dim() > 1}
    return max(found, key=lambda d: torch.finfo(d).eps, default=torch.float32)


def longest_reduction(graph: Graph, sizes: dict[sympy.Symbol, int]) -> int:
    """The longest inner dimension of the graph's products, keys of an attention included."""
    longest = 1
    for node in graph.graph.nodes:
        name = _name(node)
        if name not in _PRODUCTS:
            continue
        tensors = [graph.value(n) for n in node.all_input_nodes]
        tensors = [t for t in tensors if isinstance(t, torch.Tensor) and t.dim() > 0]
        last = [number_of(t.shape[-1], sizes) for t in tensors if t.dim() > 1]
        if name.endswith("attention"):
            last += [number_of(t.shape[-2], sizes) for t in tensors if t.dim() > 2]
        longest = max([longest, *last])
    return longest


def number_of(size: Any, sizes: dict[sympy.Symbol, int]) -> int:
    """A dimension as a plain number under ``sizes``."""
    return int(expression(size).subs(sizes))


# -- running --------------------------------------------------------------------------------------------------------


class Probe:
    """Seeded inputs for one graph and everything that passes make of it.

    Args:
        model: its parameters and buffers are what the graph computes with.
        graph: as captured; later graphs have the same inputs.

    Raises:
        NumericsError: the weights hold no numbers, or the graph continues from a filled cache.
    """

    def __init__(self, model: torch.nn.Module, graph: Graph) -> None:
        self.parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        meta = next((w.path for w in graph.weights.values() if w.value.is_meta), None)
        if meta is not None:
            remedy = "load the weights, or plan without check"
            raise NumericsError("it is on the meta device, so nothing can be compared", where=meta, remedy=remedy)
        self.sizes = _sizes(graph)
        self.tokens = {n.args[0].name for n in graph.graph.nodes if is_append(n) and n.args[0].op == "placeholder"}
        generator = torch.Generator().manual_seed(SEED)
        vocabulary = _vocabulary(model)
        self.given: dict[str, Any] = {}
        for node in graph.graph.nodes:
            if node.op != "placeholder" or node.name in self.tokens or node.name in graph.weights:
                continue
            self.given[node.name] = self._input(node, generator, vocabulary)
        for name in self.tokens:
            length = number_of(graph.value(graph.node(name)).shape[0], self.sizes)
            if length != 1:
                what = f"the graph continues from {length - 1} cached positions, which this check does not have"
                raise NumericsError(what, where=name, remedy="check the graph of an empty cache")
        self._folded: dict[tuple[str, ...], tuple[Any, tuple[torch.Tensor, ...]]] = {}

    def _input(self, node: fx.Node, generator: torch.Generator, vocabulary: int) -> Any:
        fake = node.meta.get(VALUE)
        if not isinstance(fake, torch.Tensor):
            return number_of(fake, self.sizes) if isinstance(fake, (int, torch.SymInt)) else fake
        shape = [number_of(s, self.sizes) for s in fake.shape]
        if "input_ids" in node.name or "labels" in node.name:
            value = torch.randint(vocabulary, shape, generator=generator, dtype=fake.dtype)
        elif fake.is_floating_point():
            value = torch.randn(shape, generator=generator).to(fake.dtype)
        elif "position" in node.name and shape:
            value = torch.arange(shape[-1], dtype=fake.dtype).expand(shape).clone()
        else:  # masks and the like: everything is seen
            value = torch.ones(shape, dtype=fake.dtype)
        return value.to(fake.device)

    def forward(self, graph: Graph, like: Run | None = None) -> Run:
        """Run a graph without gradients.

        Args:
            like: an earlier run. Where the same call picks by comparing (top-k experts), its picks are taken over, so
                that a tie within rounding does not send a token elsewhere; the scores themselves are compared.
        """
        arenas: list[Arena] = []
        recorder = _Recorder(graph.module, {} if like is None else like.picks)
        with torch.no_grad():
            results = recorder.run(*self._arguments(graph, {}, arenas))
        return Run(recorder.samples, recorder.modules, _outputs(graph, results), recorder.picks)

    def backward(self, graph: Graph) -> Run:
        """Gradients of every parameter for a seeded cotangent of the outputs; the graph must not append to a cache.

        Parameters that the outputs do not depend on have gradient zero.
        """
        leaves = {
            w.path: w.value.detach().requires_grad_(True)
            for w in graph.weights.values()
            if w.path in self.parameters and w.value.is_floating_point()
        }
        with torch.enable_grad():
            results = fx.Interpreter(graph.module).run(*self._arguments(graph, leaves, []))
            generator = torch.Generator().manual_seed(SEED)
            outputs = [t for t in _outputs(graph, results).values() if t.requires_grad]
            if not outputs:
                raise NumericsError("no output depends on a parameter", where="check of gradients")
            cotangents = [torch.randn(t.shape, generator=generator).to(t) for t in outputs]
            gradients = torch.autograd.grad(outputs, list(leaves.values()), cotangents, allow_unused=True)
        samples = {
            path: Sample.of(torch.zeros_like(leaf) if gradient is None else gradient, GRADIENT_SAMPLE)
            for (path, leaf), gradient in zip(leaves.items(), gradients, strict=True)
        }
        return Run(samples, {path: path.rpartition(".")[0] for path in samples})

    def _arguments(self, graph: Graph, leaves: dict[str, torch.Tensor], arenas: list[Arena]) -> list[Any]:
        """What the graph's placeholders stand for, in order. ``arenas`` keeps the fresh cache alive."""
        added = {a.placeholder: a.path for a in graph.added}
        made = self._made(graph, leaves)
        arguments: list[Any] = []
        for node in graph.graph.nodes:
            if node.op != "placeholder":
                continue
            if node.name in self.tokens:
                arenas.append(Arena(where=node.name))
                arguments.append(make_token(arenas[-1], 0))
            elif node.name in added:
                arguments.append(made[added[node.name]])
            elif node.name in graph.weights:
                weight = graph.weights[node.name]
                arguments.append(leaves.get(weight.path, weight.value))
            else:
                arguments.append(self.given[node.name])
        return arguments

    def _made(self, graph: Graph, leaves: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The values of the graph's new weights by their recipes; kept from run to run unless gradients are wanted."""
        made: dict[str, torch.Tensor] = {}
        for recipe, _ in recipes_of(graph.added):
            kept = self._folded.get(recipe.targets)
            if leaves or kept is None or kept[0] is not recipe.function:
                sources = []
                for path in recipe.sources:
                    weight = graph.weight_at(path)
                    assert path in made or weight is not None  # the verifier saw to it
                    sources.append(made[path] if path in made else leaves.get(path, weight.value))  # type: ignore[union-attr]
                kept = (recipe.function, tuple(recipe.function(*sources)))
                if not leaves:
                    self._folded[recipe.targets] = kept
            made.update(zip(recipe.targets, kept[1], strict=True))
        return made


class _Recorder(fx.Interpreter):
    """Keeps a sample of every floating value when it is made (later nodes may write into it)."""

    def __init__(self, module: fx.GraphModule, taken: dict[str, tuple[str, Any]]) -> None:
        super().__init__(module)
        self.samples: dict[str, Sample] = {}
        self.modules: dict[str, str] = {}
        self.picks: dict[str, tuple[str, Any]] = {}
        self._taken = taken

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op in ("placeholder", "output", "get_attr"):
            return value
        if _name(n) in _PICKS:
            value = self._pick(n, value)
        if isinstance(value, torch.Tensor):
            self.modules[n.name] = module_path(n)
            if value.is_floating_point() or value.is_complex():
                self.samples[n.name] = Sample.of(value)
        return value

    def _pick(self, node: fx.Node, value: Any) -> Any:
        call = f"{node.target} {node.args} {node.kwargs}"
        before, taken = self._taken.get(node.name, ("", None))
        if before == call and _shapes(taken) == _shapes(value):
            value = taken if isinstance(value, torch.Tensor) else (value[0], taken[1])
        self.picks[node.name] = (call, value)
        return value


def _shapes(value: Any) -> list[torch.Size]:
    return [t.shape for t in (value if isinstance(value, tuple) else [value]) if isinstance(t, torch.Tensor)]


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "_opname", None) or getattr(node.target, "__name__", None) or node.target)


def is_append(node: fx.Node) -> bool:
    return getattr(node.target, "_opname", "") == "cache_append"


def _outputs(graph: Graph, results: Any) -> dict[str, torch.Tensor]:
    """Tensor outputs by the name ``output i``, cache tokens left out (they name the run's own cache)."""
    node = next(n for n in graph.graph.nodes if n.op == "output")
    values: list[Any] = []
    fx.node.map_aggregate(results, lambda value: values.append(value) or value)  # type: ignore[func-returns-value]
    sources: list[Any] = []
    fx.node.map_aggregate(node.args[0], lambda value: sources.append(value) or value)  # type: ignore[func-returns-value]
    found = {}
    for index, (source, value) in enumerate(zip(sources, values, strict=True)):
        token = isinstance(source, fx.Node) and any(is_append(n) for n in source.all_input_nodes)
        if isinstance(value, torch.Tensor) and not (token and source.args[1] == 1):
            found[f"output {index}"] = value
    return found


def _vocabulary(model: torch.nn.Module) -> int:
    config = getattr(model, "config", None)
    text: Any = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    return int(getattr(text, "vocab_size", 2))


def _sizes(graph: Graph) -> dict[sympy.Symbol, int]:
    """Numbers for the shape symbols: ours for batch and length if every guard of the trace allows them."""
    hints: dict[sympy.Symbol, int] = {}
    wanted: dict[sympy.Symbol, int] = {}
    for node in graph.graph.nodes:
        value = node.meta.get(VALUE)
        if node.op != "placeholder":
            continue
        for size in value.shape if isinstance(value, torch.Tensor) else [value]:
            if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                hints[size.node.expr] = int(size.node.hint)
        if isinstance(value, torch.Tensor) and "input_ids" in node.name and value.dim() == 2:
            for size, number in zip(value.shape, (BATCH, LENGTH), strict=True):
                if isinstance(expression(size), sympy.Symbol):
                    wanted[expression(size)] = number
    chosen = {**hints, **wanted}
    return chosen if _allowed(graph, chosen) else hints


def _allowed(graph: Graph, sizes: dict[sympy.Symbol, int]) -> bool:
    environment = graph.fake_mode.shape_env
    guards: Sequence[Any] = environment.guards if environment is not None else ()
    return all(guard.expr.subs(sizes) != sympy.false for guard in guards)
