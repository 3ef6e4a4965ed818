"""tensor-parallel: heads and inner features over the ranks of an axis, in column and row pairs found from the graph."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import fx

from latentscan.ir.axes import AxisError, Placement, Units, is_einsum, is_matmul, results
from latentscan.ir.errors import MeshError
from latentscan.ir.graph import Graph, module_path, written_by
from latentscan.ir.kept import storage_of
from latentscan.ir.layout import is_layout, linear_of
from latentscan.ir.mesh import Axis, shares
from latentscan.ir.mla import argument
from latentscan.ir.normalize import ATTENTION as ATTENTION_OP
from latentscan.ir.normalize import LATENT_ATTENTION
from latentscan.ir.region import COLUMN, CONTRACT, ROW, SCANS, Region, attention_operands, grow, op_name, picks_rows
from latentscan.passes.base import Context, Pass, Refusal, Site, Tier
from latentscan.passes.experts import Mixture, WholeExperts, is_grouped, mixture_at
from latentscan.passes.sharding import Split, lone_biases
from latentscan.passes.vocabulary import split_vocabulary, vocabularies, vocabulary_site


@dataclass(frozen=True)
class TensorParallel(Pass):
    """Split attention heads and MLP features over the mesh's axis ``tp`` (MATH 5)."""

    name: ClassVar[str] = "tensor-parallel"
    tier: ClassVar[Tier] = Tier.REASSOCIATING
    after: ClassVar[tuple[str, ...]] = ("mha-to-mla", "mla-mm-split", "latent-cache", "mla-absorb")
    summary: ClassVar[str] = "attention heads and MLP features over the ranks of the mesh's axis tp"
    math: ClassVar[str] = (
        "A region lies between linear maps whose rows are split (columns) and linear maps that sum over what was split "
        "(rows), and is found by following heads or features through the graph. Ranks get whole KV groups, the first "
        "ones one more; with more ranks than KV heads the query heads are dealt out and KV heads are held twice. What "
        "enters a region has its gradient summed over the ranks, and so has every weight inside that several ranks "
        "hold; what leaves it is one all-reduce, to which the first rank adds the bias (a bias that trains while its "
        "weight does not is held by all ranks and added behind it). A region is rewritten "
        "completely or refused completely. Of a mixture each rank holds whole experts if the ranks divide their number "
        "(experts=whole: also if not), else some inner features of every expert; either way the sum over the ranks "
        "comes behind the sum over a token's experts."
    )

    experts: str = field(default="auto", metadata={"choices": ("auto", "whole", "features")})

    def plan(self, graph: Graph, context: Context) -> list[Site | Refusal]:
        axis = tp_axis(context)
        found: list[Site | Refusal] = []
        if axis.size == 1:
            return [Refusal("", "one-rank", "the mesh has one rank along tp", "give a mesh such as tp=2")]
        inside: dict[fx.Node, str] = {}
        candidates = [n for n in graph.nodes if _is_mixer(n)]
        candidates += [n for n in graph.nodes if _sums_experts(graph, n)]
        candidates += [n for n in graph.nodes if linear_of(graph, n) is not None]
        for anchor in candidates:
            if anchor in inside:
                continue
            why = ""
            if _sums_experts(graph, anchor):
                made, mixture, why = self._whole(graph, anchor, axis, inside)
                if made is not None:
                    found += [made] if made not in found else []
                    inside.update(dict.fromkeys(mixture.inside if mixture is not None else (), ""))
                    continue
            try:
                region = region_at(graph, anchor, axis)
                check_region(graph, region, axis, inside)
            except AxisError as error:
                found.append(_refusal(anchor, error))
                continue
            inside.update(dict.fromkeys(region.roles, ""))
            found.append(self._with_biases(graph, _site(graph, anchor, region, axis, why), region, context))
        planned = {m for (name, m), facts in context.facts.items() if name == self.name and "rows" in facts}
        for weight in vocabularies(graph, planned):
            made = vocabulary_site(graph, weight, axis, inside)
            found.append(made)
            if isinstance(made, Site):
                inside.update(dict.fromkeys(weight.users, ""))
        found = [f for f in found if not (isinstance(f, Refusal) and self._covered(graph, f, inside))]
        return [self._as_planned(f, context) for f in found]

    def _whole(
        self, graph: Graph, anchor: fx.Node, axis: Axis, inside: dict[fx.Node, str]
    ) -> tuple[Site | Refusal | None, Mixture | None, str]:
        """A site that keeps experts whole or why there is none, its mixture, and why features are split instead."""
        if self.experts == "features":
            return None, None, "as the option says"
        try:
            mixture = mixture_at(graph, anchor)
            odd = next((n for n in mixture.inside if n in inside), None)
            if odd is not None:
                raise AxisError(odd, f"{odd.name} is part of another region")
        except AxisError as error:
            return (_refusal(anchor, error) if self.experts == "whole" else None), None, f"not whole experts: {error}"
        count = mixture.experts
        if self.experts == "auto" and count % axis.size:
            return None, None, f"{axis.size} ranks do not divide {count} experts"
        if count < axis.size:
            reason = f"{axis.size} ranks share {count} experts, so that some would have none"
            return Refusal(module_path(anchor), "too-few-experts", reason, "use experts=features"), None, ""
        return _experts_site(graph, anchor, mixture, axis), mixture, ""

    def _with_biases(self, graph: Graph, site: Site, region: Region, context: Context) -> Site:
        """A site that also says if biases of sums are on all ranks, in later graphs as it was planned."""
        known = {module: facts for (name, module), facts in context.facts.items() if name == self.name}
        whole = lone_biases(graph, region)
        if known:
            whole = known.get(site.module, {}).get("row_biases") == "whole"
        if not whole:
            return site
        note = f"{site.note}; all ranks hold the biases of sums, which train alone"
        return replace(site, facts={**site.facts, "row_biases": "whole"}, note=note)

    def _as_planned(self, found: Site | Refusal, context: Context) -> Site | Refusal:
        """Later graphs of a model split what was split when it was wrapped, and nothing else."""
        planned = {module for name, module in context.facts if name == self.name}
        if not planned or isinstance(found, Refusal) or found.module in planned:
            return found
        return Refusal(found.module, "not-planned", "it was whole when the model was wrapped", "wrap the model again")

    def _covered(self, graph: Graph, refusal: Refusal, inside: dict[fx.Node, str]) -> bool:
        """Whether a linear map that could not be a row turned out to be part of a later region."""
        if refusal.rule != "not-paired" and refusal.rule != "not-followed":
            return False
        paths = {module_path(n) for n in inside if linear_of(graph, n) is not None or is_matmul(n) or is_grouped(n)}
        return refusal.module in paths

    def apply(self, graph: Graph, site: Site, context: Context) -> None:
        axis = tp_axis(context)
        if site.rule == "vocabulary":
            split_vocabulary(graph, graph.node(site.anchor), axis, self.name, site.module)
            return
        if site.rule == "whole-experts":
            mixture = mixture_at(graph, graph.node(site.anchor))
            WholeExperts(graph, mixture, axis, self.name, site.module).run()
            return
        region = region_at(graph, graph.node(site.anchor), axis)
        whole = site.facts.get("row_biases") == "whole"
        Split(graph, region, axis, self.name, site.module, whole_biases=whole).run()


def tp_axis(context: Context) -> Axis:
    if context.mesh is None:
        raise MeshError(
            "there is no mesh to split over", where="tensor-parallel", remedy="give one: wrap(model, ..., mesh='tp=2')"
        )
    return context.mesh.axis("tp")


def _is_mixer(node: fx.Node) -> bool:
    """Whether a node has heads: an attention or a scan."""
    plain = (F.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention)
    return node.op == "call_function" and (
        node.target in (ATTENTION_OP, LATENT_ATTENTION, *plain) or op_name(node) in SCANS
    )


def _heads(graph: Graph, anchor: fx.Node) -> tuple[fx.Node, int, int]:
    """The result of a mixer, and its numbers of heads and of groups that share keys (or B and C)."""
    if op_name(anchor) in SCANS:
        heads = next(leaf for place, leaf in results(anchor) if place == (0,))
        shape = graph.shape(argument(anchor, "B"))  # type: ignore[arg-type]
        return heads, int(graph.shape(heads)[-2]), int(shape[-2])
    query, keys, _ = attention_operands(anchor)
    if anchor.target is LATENT_ATTENTION:
        return anchor, int(graph.shape(anchor)[1]), _absorbed_groups(graph, query) or int(graph.shape(anchor)[1])
    return anchor, int(graph.shape(anchor)[1]), max([int(graph.shape(k)[1]) for k in keys] or [1])


def _absorbed_groups(graph: Graph, query: fx.Node) -> int | None:
    """KV groups of an absorbed attention: its queries come from an einsum with one up-projection a group."""
    stack, seen = [query], set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if is_einsum(node) and len(graph.shape(node.args[2])) == 3:  # type: ignore[arg-type]
            return int(graph.shape(node.args[2])[0])  # type: ignore[arg-type]
        if is_layout(node):
            stack.extend(n for n in node.all_input_nodes if isinstance(graph.value(n), (torch.Tensor, tuple, list)))
    return None


def region_at(graph: Graph, anchor: fx.Node, axis: Axis) -> Region:
    """The region of an attention, or the one that ends in a linear map. Raises AxisError, MeshError."""
    linear = linear_of(graph, anchor)
    if linear is None and not _is_mixer(anchor):
        return expert_region(graph, anchor)
    if linear is None:
        result, heads, groups = _heads(graph, anchor)
        if heads < axis.size:
            raise MeshError(
                f"{axis.size} ranks share {heads} heads, so that some would have none",
                where=module_path(anchor),
                remedy=f"use tp={heads} or less",
            )
        count = groups if groups >= axis.size else heads
        labels = torch.arange(heads) // (heads // count)
        dim = 1 if result is anchor else len(graph.shape(result)) - 2
        start = {result: Placement(dim, labels)}
        if groups > 1 or op_name(anchor) not in SCANS:
            return grow(graph, Units(count), start)
        try:  # B and C of one group for all heads: beside them in one projection, or made by one of their own
            return grow(graph, Units(count, common=True), start)
        except AxisError as error:
            try:
                return grow(graph, Units(count), start)
            except AxisError:
                raise error from None
    rank = len(graph.shape(linear.x))
    width = graph.shape(linear.x)[-1]
    if not isinstance(width, int):
        raise AxisError(anchor, f"{linear.x.name} has no fixed number of features")
    region = grow(graph, Units(width), {linear.x: Placement(rank - 1, torch.arange(width))})
    if width < axis.size:
        raise AxisError(anchor, f"{width} features for {axis.size} ranks")
    return region


def _sums_experts(graph: Graph, node: fx.Node) -> bool:
    """Whether a node multiplies with the weights of chosen experts."""
    return (
        is_grouped(node)
        or is_matmul(node)
        and any(picks_rows(graph, x) for x in node.args[:2] if isinstance(x, fx.Node))
    )


def expert_region(graph: Graph, anchor: fx.Node) -> Region:
    """The region that ends where a product with experts' weights sums over their inner features."""
    x: Any = anchor.args[0]
    width = graph.shape(x)[-1]
    if not isinstance(width, int):
        raise AxisError(anchor, f"{x.name} has no fixed number of features")
    return grow(graph, Units(width), {x: Placement(len(graph.shape(x)) - 1, torch.arange(width))})


def check_region(graph: Graph, region: Region, axis: Axis, inside: dict[fx.Node, str]) -> None:
    """Raise AxisError unless a region can be rewritten as a whole."""
    labels: dict[str, torch.Tensor] = {}
    if not region.ops(COLUMN) and not region.weights(graph):
        raise AxisError(region.ops(ROW, CONTRACT)[0], "nothing above it is split")
    last = {storage_of(w): n for n in graph.nodes if (w := written_by(n)) is not None}
    for op in region.ops():
        for entry in region.entries(op):  # its copy, made for the first reader, serves all
            writer = last.get(storage_of(entry))
            if writer is not None and op < writer:
                raise AxisError(op, f"{entry.name} is written by {writer.name} after {op.name} has read it")
    for op in region.ops():
        if op in inside:
            raise AxisError(op, f"{op.name} is part of another region")
        if region.roles[op] not in (COLUMN, ROW):
            continue
        linear = region.linears[op]
        mine = region.placed[op if region.roles[op] == COLUMN else linear.x].labels
        for node in (linear.weight, linear.bias):
            if node is None:
                continue
            outside = next((u for u in node.users if u not in region.roles), None)
            if outside is not None:
                raise AxisError(op, f"the weight {graph.weight(node).path} is also read by {outside.name}")  # type: ignore[union-attr]
            if not torch.equal(labels.setdefault(node.name, mine), mine):
                raise AxisError(op, f"the weight {graph.weight(node).path} would be split in two ways")  # type: ignore[union-attr]


def common_module(nodes: list[fx.Node]) -> str:
    """The module that holds all of the nodes."""
    paths = [module_path(n).split(".") for n in nodes]
    same = 0
    while all(len(p) > same for p in paths) and len({p[same] for p in paths}) == 1:
        same += 1
    return ".".join(paths[0][:same])


def _experts_site(graph: Graph, anchor: fx.Node, mixture: Mixture, axis: Axis) -> Site:
    counts = shares(mixture.experts, axis.size)
    facts = {"units": mixture.experts, "ranks": axis.size, "of_rank": "|".join(map(str, counts)), "experts": "whole"}
    module = graph.weight(mixture.weights[0]).path.rpartition(".")[0]  # type: ignore[union-attr]
    how = "sorted pairs: a rank computes its own" if mixture.products else "pairs by number: a rank computes all"
    return Site(module, "whole-experts", anchor.name, facts, f"experts: {', '.join(map(str, counts))}; {how}")


def _site(graph: Graph, anchor: fx.Node, region: Region, axis: Axis, why: str = "") -> Site:
    columns, rows = region.ops(COLUMN), region.ops(ROW, CONTRACT)
    attention = _is_mixer(anchor)
    counts = shares(region.units.count, axis.size)
    module = common_module([*columns, *rows])
    if region.ops(CONTRACT):  # the module that holds the experts' weights
        module = graph.weight(region.weights(graph)[0]).path.rpartition(".")[0]  # type: ignore[union-attr]
    facts: dict[str, Any] = {"units": region.units.count, "ranks": axis.size, "of_rank": "|".join(map(str, counts))}
    what = "features"
    if attention:
        _, facts["heads"], groups = _heads(graph, anchor)
        what = "groups" if op_name(anchor) in SCANS else "KV groups"
        if region.units.count > groups:
            what = f"heads; {what} are held by all ranks that read them"
    note = f"{what}: {', '.join(map(str, counts))}; {len(columns)} columns, {len(rows)} rows"
    note += f"; {why}" if why else ""
    rule = "heads" if attention else "experts" if region.ops(CONTRACT) else "features"
    return Site(module, rule, anchor.name, facts, note)


def _refusal(anchor: fx.Node, error: AxisError) -> Refusal:
    attention = _is_mixer(anchor)
    return Refusal(
        module_path(anchor),
        "not-followed" if attention or is_matmul(anchor) else "not-paired",
        f"{error} (at {module_path(error.node) or error.node.name})",
        "it stays whole on every rank",
    )


__all__ = ["TensorParallel", "region_at"]
