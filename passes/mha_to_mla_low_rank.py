"""The low-rank forms of mha-to-mla: which keys keep their rotation, how wide each latent is, and the new graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import fx

from latentscan.ir.errors import PipelineError
from latentscan.ir.graph import VALUE, Graph, module_path
from latentscan.ir.layout import LayoutError, as_slice
from latentscan.ir.mla import argument, attention_like, latent_node, ungrouped
from latentscan.ir.ops.rope import ROPE as ROPE_INFO
from latentscan.ir.weights import Recipe
from latentscan.passes import lowrank
from latentscan.passes.base import Context, Refusal, Site
from latentscan.passes.mha_to_mla import Found, _heads, _replace_stored, stored
from latentscan.passes.mha_to_mla_rotary import Place, Sources, heads_of, inputs_of, place_of

if TYPE_CHECKING:
    from latentscan.passes.mha_to_mla import MhaToMla

ROPE = ROPE_INFO.op
PER_HEAD = "pca"  # the method whose rotated keys stay apart for every KV head; the others share one


def plan_low_rank(options: MhaToMla, graph: Graph, context: Context) -> list[Site | Refusal]:
    """A site or a refusal for every attention; with ``allocation=energy`` the ranks are set for all of them at once."""
    found: list[Site | Refusal] = []
    open_ranks: list[tuple[int, torch.Tensor, int]] = []  # position, energies, largest rank
    places: dict[str, Place] = {}
    for node in attention_like(graph):
        module = module_path(node)
        try:
            place = place_of(graph, node, module, context)
            if isinstance(place, Refusal):
                found.append(place)
                continue
            site, most = _site(options, graph, place, context)
        except LayoutError as error:
            found.append(Refusal(module, "layout-unknown", str(error), "report the model: its layout is new"))
            continue
        found.append(site)
        if options.allocation == "energy" and site.module in (context.statistics or {}) and not context.meta:
            if (options.name, site.module) not in context.facts:
                places[site.module] = place
                open_ranks.append((len(found) - 1, _energies(graph, place, site, context), most))
    if open_ranks:
        assert options.rank is not None
        step = 8 if options.rank >= 32 and options.rank % 8 == 0 else 4 if options.rank >= 32 else 1
        ranks = lowrank.spread_ranks([e for _, e, _ in open_ranks], options.rank, [m for *_, m in open_ranks], step)
        for (position, *_), rank in zip(open_ranks, ranks, strict=True):
            site = found[position]  # type: ignore[assignment]
            found[position] = _noted(site, site.facts | {"d_c": rank})
            method = str(site.facts.get("method", PER_HEAD))
            assert context.statistics is not None
            moments = context.statistics[site.module]
            _check_spanned(places[site.module], method, rank, moments, f"{options.name} at {site.module}")
    return found


def _site(options: MhaToMla, graph: Graph, place: Place, context: Context) -> tuple[Site, int]:
    """The site with its uniform rank, and the largest rank that it could have."""
    _, kv_heads, width, value_width = place.sizes
    planned = context.facts.get((options.name, place.module))
    method = options.low_rank_method if planned is None else str(planned.get("method", PER_HEAD))
    inner = int(graph.shape(place.key.linear.x)[-1])  # type: ignore[union-attr]
    rope_dim = _rope_dim(options, place, method)
    rank = options.rank
    assert rank is not None  # check_options
    most = min(inner, kv_heads * (width + value_width) - rope_dim)
    if rank > most:
        raise PipelineError(
            f"rank={rank} is larger than {most}, all that K and V hold beside rope_dim={rope_dim}",
            where=f"{options.name} at {place.module}",
            remedy=f"give rank <= {most}",
        )
    count = rope_dim // (2 * kv_heads if method == PER_HEAD else 2)
    if planned is not None:
        pairs = str(planned["pairs"])
        if options.allocation == "energy":
            rank = int(planned["d_c"])
    elif context.meta:
        folds = method != PER_HEAD and lowrank.METHODS[method].folding
        fold = max(1, width // 2 // count) if folds else 1
        pairs = _text([i * fold % (width // 2) for i in range(count)])
    elif context.statistics is None or place.module not in context.statistics:
        raise _no_calibration(f"{options.name} at {place.module}")
    else:
        _check_spanned(place, method, rank, context.statistics[place.module], f"{options.name} at {place.module}")
        pairs = _text(_pairs(graph, place, method, count, context.statistics[place.module]))
    before = kv_heads * (width + value_width)
    facts: dict[str, Any] = {"kv_heads": kv_heads, "before": before, "d_c": rank, "d_r": rope_dim, "pairs": pairs}
    if method != PER_HEAD:
        facts["method"] = method
    return _noted(Site(place.module, "low-rank", place.found.node.name), facts), most


def _noted(site: Site, facts: dict[str, Any]) -> Site:
    note = (
        f"{facts['before']} -> {facts['d_c'] + facts['d_r']} elements per token: latent {facts['d_c']}, "
        f"rotated {facts['d_r']}"
    )
    return Site(site.module, site.rule, site.anchor, facts, note)


def _text(pairs: Sequence[int]) -> str:
    return "|".join(map(str, sorted(pairs)))


def _no_calibration(where: str) -> PipelineError:
    return PipelineError(
        "the low-rank form needs calibration", where=where,
        remedy="give calibration=<text file, list of strings or token tensor>",
    )  # fmt: skip


def _check_spanned(place: Place, method: str, rank: int, moments: Any, where: str) -> None:
    """Raise unless a layer's inputs, as the method sees them, span as many directions as its latent has features."""
    attended, centred = False, False
    if method != PER_HEAD:
        seen = method_of(place, method)
        attended, centred = seen.attended and moments.attended is not None, seen.centred
    second, mean = (moments.attended, moments.attended_mean) if attended else (moments.covariance, moments.mean)
    if not bool(second.isfinite().all()):
        raise PipelineError(
            "the layer's inputs on the calibration data are not finite", where=where,
            remedy="give a model whose outputs are finite, or calibrate it in a wider dtype",
        )  # fmt: skip
    more = "give more text, of the kind that the model will see (some thousand tokens), or a smaller rank"
    if moments.tokens < rank:
        raise PipelineError(
            f"the calibration data are {moments.tokens} tokens, too few for a latent of {rank} features", where=where,
            remedy=more,
        )  # fmt: skip
    spanned = lowrank.directions(second, mean if centred else None)
    if spanned < rank:
        beside = " beside their mean" if centred else ""
        raise PipelineError(
            f"the layer's inputs on {moments.tokens} tokens of calibration data span {spanned} directions{beside}, too "
            f"few for a latent of {rank} features", where=where, remedy=more,
        )  # fmt: skip


def _rope_dim(options: MhaToMla, place: Place, method: str) -> int:
    """d_r, given or by default, checked against the heads."""
    _, kv_heads, width, _ = place.sizes
    given, rank, key = options.rope_dim, options.rank or 0, kv_heads * width
    if method == PER_HEAD:
        value, step, most = given or kv_heads * max(2, width // 8 * 2), 2 * kv_heads, key - 2 * kv_heads
        fits, remedy = value % step == 0 and value <= most, f"give a multiple of {step} below {key}"
    elif method == "transmla":
        value = given or width
        fits = value % 2 == 0 and 0 < value < key and width % value == 0
        some = [d for d in range(width, 1, -2) if width % d == 0 and d < key]
        remedy = f"give {' or '.join(map(str, some[:4]))}: one component for every group of neighbouring frequencies"
    elif method == "transmla-unfolded":
        value = given or width
        fits, remedy = value % 2 == 0 and 0 < value < key and value <= width, f"give an even number up to {width}"
    else:
        value = given or min(max(2, round(rank / 6) * 2), key - 2)
        fits, remedy = value % 2 == 0 and 0 < value < key, f"give an even number below {key}"
    if not fits:
        raise PipelineError(
            f"rope_dim={value} does not fit {kv_heads} KV heads of {width} features"
            + ("" if method == PER_HEAD else f" with method={method}"),
            where=f"{options.name} at {place.module}",
            remedy=remedy,
        )
    return value


# -- numbers ----------------------------------------------------------------------------------------------------------


def method_of(place: Place, name: str) -> lowrank.Method:
    """The named method; with sinks or a softcap a constant cannot leave the latent."""
    method = lowrank.METHODS[name]
    free = all(argument(place.found.node, n) is None for n in ("sinks", "softcap"))
    return method if free else replace(method, centred=False)


def _pairs(graph: Graph, place: Place, method: str, count: int, moments: Any) -> list[int]:
    sources = Sources.of(graph, place, query=True, output=False)
    given = sources.values(graph)
    if method == PER_HEAD:
        heads, kv_heads, *_ = place.sizes
        q, k = (sources.matrix(given, part).flatten(0, 1) for part in "qk")
        c = moments.covariance.to(k.device)
        return lowrank.rotary_pairs_by_energy(q, k, c, heads, kv_heads, count, place.frequencies, moments.length)
    heads_ = heads_of(place, sources, given)
    inputs = inputs_of(moments, heads_.key.device)
    return lowrank.choose_pairs(heads_, inputs, method_of(place, method), count)


def _energies(graph: Graph, place: Place, site: Site, context: Context) -> torch.Tensor:
    """What every latent feature saves, as a share of the layer's weighted energy."""
    assert context.statistics is not None
    sources = Sources.of(graph, place, query=True, output=True)
    heads = heads_of(place, sources, sources.values(graph))
    moments, pairs = context.statistics[site.module], _numbers(site)
    name = str(site.facts.get("method", PER_HEAD))
    if name == PER_HEAD:
        _, _, width, _ = place.sizes
        _, plain = _features(pairs, width)
        k, v = heads.key[:, plain, :-1].flatten(0, 1), heads.value[..., :-1].flatten(0, 1)
        energies = lowrank.joint_energies(k, v, moments.covariance.to(k.device))
    else:
        inputs = inputs_of(moments, heads.key.device)
        problem = lowrank.decouple(heads, inputs, method_of(place, name), pairs)
        energies = lowrank.energies_of(problem)
    return (energies / energies.sum().clamp_min(1e-300)).cpu()


def _numbers(site: Site) -> list[int]:
    return [int(i) for i in str(site.facts["pairs"]).split("|")]


def _features(pairs: list[int], width: int) -> tuple[list[int], list[int]]:
    """Rotated and other features of every head, for pairs that keep their rotation in all heads."""
    rotated = pairs + [p + width // 2 for p in pairs]
    return rotated, [i for i in range(width) if i not in set(rotated)]


# -- the new graph ----------------------------------------------------------------------------------------------------


def apply_low_rank(options: MhaToMla, graph: Graph, site: Site, context: Context) -> None:
    place = place_of(graph, graph.node(site.anchor), site.module, context)
    assert not isinstance(place, Refusal)
    found, query, key = place.found, place.query, place.key
    assert query.linear and key.linear and found.key_rope and found.query_rope
    heads, kv_heads, width, value_width = place.sizes
    pairs, rank, shared = _numbers(site), int(site.facts["d_c"]), "method" in site.facts
    if shared:
        half = width // 2
        turned = pairs + [p + half for p in pairs]
        by_loss = lowrank.METHODS[str(site.facts["method"])].by_loss
        left = lowrank.plain_pairs(pairs, kv_heads, half) if by_loss else list(range(half))
        n_plain, rope_heads = 2 * len(left), 1
        query_plain, query_rotated = list(range(n_plain)), list(range(n_plain, n_plain + len(turned)))
    else:
        turned, query_plain = _features(pairs, width)
        query_rotated, n_plain, rope_heads = turned, len(query_plain), kv_heads
    recipe = recipe_of(options, graph, site, place, context)
    query_width = n_plain + len(turned)
    like = graph.value(key.linear.weight)
    inner, query_inner = (int(graph.shape(part.linear.x)[-1]) for part in (key, query))  # type: ignore[union-attr]
    sizes = {
        "kv_down": (rank, inner),
        "k_up": (kv_heads * n_plain, rank),
        "v_up": (kv_heads * value_width, rank),
        "k_rope": (rope_heads * len(turned), inner),
        "q": (heads * query_width, query_inner),
    }
    values, names = [], [t.rsplit("latentscan_", 1)[1] for t in recipe.targets]
    for name in names:
        part, kind = name.rsplit("_", 1)
        values.append(like.new_empty(sizes[part] if kind == "weight" else sizes[part][:1]))
    new = dict(zip(names, graph.add_weights(recipe, values), strict=True))

    def turn(x: fx.Node, rope: fx.Node) -> fx.Node:
        tables = (graph.call(operator.getitem, t, (Ellipsis, _index(turned))) for t in rope.args[1:3])
        return graph.call(ROPE, x, *tables, **dict(rope.kwargs))

    def project(x: fx.Node, name: str) -> fx.Node:
        return graph.call(F.linear, x, new[f"{name}_weight"], new.get(f"{name}_bias"))

    with graph.before(found.key, options.name):
        x = latent_node(graph, key.linear.x)
        latent = project(x, "kv_down")
        k_plain = _heads(graph, project(latent, "k_up"), kv_heads, n_plain)
        v = _heads(graph, project(latent, "v_up"), kv_heads, value_width)
        k_rot = turn(_heads(graph, project(x, "k_rope"), rope_heads, len(turned)), found.key_rope)
        if rope_heads != kv_heads:
            k_rot = graph.method("expand", k_rot, -1, kv_heads, -1, -1)
        k = graph.call(torch.cat, [k_plain, k_rot], dim=-1)
    with graph.before(found.query if found.query is not found.key else found.node, options.name):
        before: Any = found.query_rope.args[0]
        if "q_weight" in new:
            before = _heads(graph, project(latent_node(graph, query.linear.x), "q"), heads, query_width)
        q_plain = graph.call(operator.getitem, before, (Ellipsis, _index(query_plain)))
        q_rot = turn(graph.call(operator.getitem, before, (Ellipsis, _index(query_rotated))), found.query_rope)
        q = graph.call(torch.cat, [q_plain, q_rot], dim=-1)
    graph.replace(found.query, q)  # for whoever multiplies it with the key: attention weights that come out, too
    wider = int(graph.shape(k)[-1]) != width
    if wider and stored(graph, found.node.args[1]) is None:  # type: ignore[arg-type]
        _leave_out(graph, found, k, v, options.name)
        return
    _replace_stored(graph, found, k, v)
    if wider:
        _new_shapes(graph, k, found.node)


def recipe_of(options: MhaToMla, graph: Graph, site: Site, place: Place, context: Context) -> Recipe:
    """How the new weights of a site are made from the old ones."""
    if "method" in site.facts:
        return _shared_recipe(graph, site, place, context)
    return _per_head_recipe(graph, site, place, context, options.balance)


def _recipe(
    site: Site, context: Context, sources: Sources, names: list[str],
    make: Callable[[Sequence[torch.Tensor], Any], dict[str, torch.Tensor]],
) -> Recipe:  # fmt: skip
    statistics = context.statistics.get(site.module) if context.statistics else None

    def function(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if statistics is None:
            raise _no_calibration(site.module)
        made = make(given, statistics)
        return tuple(made[n].to(given[0].dtype).contiguous() for n in names)

    targets = tuple(f"{site.module}.latentscan_{n}" for n in names)
    rank = int(site.facts["d_c"])
    return Recipe(tuple(sources.paths), targets, "mha-to-mla", site.module, function, None, {"rank": rank})


def _per_head_recipe(graph: Graph, site: Site, place: Place, context: Context, balance: bool) -> Recipe:
    """New weights from the old projections; the query's too where it is fused with them."""
    query, key, value = place.query, place.key, place.value
    assert query.linear and key.linear and value.linear
    has_query = query.linear.node in (key.linear.node, value.linear.node)
    sources = Sources.of(graph, place, query=has_query, output=False)
    names = ["kv_down_weight", "k_up_weight", "v_up_weight", "k_rope_weight"]
    names += ["k_up_bias", "k_rope_bias"] if sources.biased("k") else []
    names += ["v_up_bias"] if sources.biased("v") else []
    names += ["q_weight"] if has_query else []
    names += ["q_bias"] if has_query and sources.biased("q") else []
    rotated, plain = _features(_numbers(site), place.sizes[2])
    rank = int(site.facts["d_c"])

    def make(given: Sequence[torch.Tensor], moments: Any) -> dict[str, torch.Tensor]:
        k, v = sources.matrix(given, "k"), sources.matrix(given, "v").flatten(0, 1)
        c = moments.covariance.to(k.device)
        factors = lowrank.balanced_joint_pca(k[:, plain].flatten(0, 1), v, c, rank, balance=balance)
        made = {
            "kv_down_weight": factors.down,
            "k_up_weight": factors.up_key * place.turn**2,  # what is not rotated is not scaled by the tables either
            "v_up_weight": factors.up_value,
            "k_rope_weight": k[:, rotated].flatten(0, 1),
        }
        if sources.biased("k"):
            bias = sources.bias(given, "k")
            made |= {"k_up_bias": bias[:, plain].flatten() * place.turn**2, "k_rope_bias": bias[:, rotated].flatten()}
        if sources.biased("v"):
            made["v_up_bias"] = sources.bias(given, "v").flatten()
        if has_query:
            made["q_weight"] = sources.matrix(given, "q").flatten(0, 1)
            if sources.biased("q"):
                made["q_bias"] = sources.bias(given, "q").flatten()
        return made

    return _recipe(site, context, sources, names, make)


def _shared_recipe(graph: Graph, site: Site, place: Place, context: Context) -> Recipe:
    """New weights with one rotated key for all heads, which the queries read in their own ways.

    Whatever is the same for all keys, a bias of theirs too, shifts all scores of a query alike: it is left out. (With
    sinks or a softcap that would be wrong; a key bias is refused there, and nothing is centred.)
    """
    method = method_of(place, str(site.facts["method"]))
    sources = Sources.of(graph, place, query=True, output=method.two_sided)
    names = ["kv_down_weight", "k_up_weight", "v_up_weight", "k_rope_weight", "q_weight"]
    names += ["k_rope_bias"] if sources.biased("k") else []
    names += ["v_up_bias"] if sources.biased("v") or method.centred else []
    names += ["q_bias"] if sources.biased("q") else []
    pairs, rank = _numbers(site), int(site.facts["d_c"])

    def make(given: Sequence[torch.Tensor], moments: Any) -> dict[str, torch.Tensor]:
        heads = heads_of(place, sources, given)
        inputs = inputs_of(moments, heads.key.device)
        problem = lowrank.decouple(heads, inputs, method, pairs)
        made = lowrank.solve(problem, rank, heads.value[..., -1])
        return {
            "kv_down_weight": made.down,
            "k_up_weight": made.up_key.flatten(0, 1),
            "v_up_weight": made.up_value.flatten(0, 1),
            "v_up_bias": made.value_bias.flatten(),
            "k_rope_weight": made.rope[:, :-1],
            "k_rope_bias": made.rope[:, -1],
            "q_weight": made.query[..., :-1].flatten(0, 1),
            "q_bias": made.query[..., -1].flatten(),
        }

    return _recipe(site, context, sources, names, make)


def _leave_out(graph: Graph, found: Found, key: fx.Node, value: fx.Node, name: str) -> None:
    """Let whatever attends read a key of another width. What leaves the graph (a training step's cache of the library,
    which nothing continues from) keeps its form, and is NaN instead of something to be mistaken for a key."""
    old = ungrouped(graph, found.node.args[1])  # type: ignore[arg-type]  # the key, or what a library's cache joins it to
    graph.replace(found.value, value)
    for node in [n for n in graph.nodes if n is not old and isinstance(graph.value(n), torch.Tensor)]:
        if ungrouped(graph, node) is old:  # the library repeats each head for its group
            with graph.before(node, name):
                groups = int(graph.shape(node)[1]) // int(graph.shape(old)[1])
                spread = graph.method("repeat_interleave", key, groups, 1)
            graph.replace(node, spread)
            _new_shapes(graph, spread, found.node)
    readers = [n for n in old.users if n.op != "output" and not _is_dead(n)]
    for node in readers:
        node.replace_input_with(old, key)
    _new_shapes(graph, key, found.node)
    output = next((n for n in old.users if n.op == "output"), None)
    if output is not None:
        with graph.before(output, name):
            one = graph.call(operator.getitem, graph.method("detach", value), (Ellipsis, slice(0, 1)))
            wide = graph.method("expand", one, -1, -1, -1, int(graph.shape(old)[-1]))
            nothing = graph.call(torch.full_like, wide, float("nan"))
        output.replace_input_with(old, nothing)


def _is_dead(node: fx.Node, steps: int = 4) -> bool:
    """Whether nothing reads a node, but for a few steps that nothing reads either (a repeat that was made anew)."""
    return node.op != "output" and steps > 0 and all(_is_dead(user, steps - 1) for user in node.users)


def _new_shapes(graph: Graph, key: fx.Node, end: fx.Node) -> None:
    """Evaluate again what lies between a key of another width and its attention: caches and their views."""
    changed = {key}
    for node in graph.graph.nodes:
        if node is end or node.op == "output" or not changed.intersection(node.all_input_nodes):
            continue
        node.meta[VALUE] = graph.evaluate(node)
        changed.add(node)


def _index(features: list[int]) -> Any:
    piece = as_slice(features)
    return piece if piece is not None else features
