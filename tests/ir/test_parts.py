"""Parts of a linear map: their outputs and gradients are those of autograd's own, in fp64, also through AOTAutograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.backends.common import aot_autograd

from latentscan.ir.ops.parts import linear_part

CHAINS = {  # parts as (first, count, keep), in their order
    "tail, conv and steps, gate": [(6, 3, 2), (4, 6, 0), (0, 4, 0)],
    "gate in the middle": [(1, 2, 3), (0, 4, 0), (7, 3, 0), (4, 3, 0)],
    "rows that nobody multiplies": [(2, 3, 1), (2, 5, 0)],
    "parts that overlap": [(1, 4, 2), (2, 5, 0), (0, 4, 0), (7, 3, 0)],
    "one": [(3, 4, 0)],
}


def chained(chain, x, weight, bias, *, wrong=False):
    tokens, made = None, []
    for i, (first, count, keep) in enumerate(chain):
        after = chain[i + 1 :]
        again = any(first < f + c and f < first + count for f, c, _ in after)
        covered = sum(c for j, (f, c, _) in enumerate(chain) if not any(
            f < g + d and g < f + c for g, d, _ in chain[j + 1 :]))  # fmt: skip
        nested = "overlap" not in str(chain) and covered == len(weight)
        rest = not after and nested
        out, *tokens = linear_part(x, weight, bias, tokens, first, count, keep, again and not wrong, rest)
        made.append(out)
    return made


def plain(chain, x, weight, bias):
    return [
        F.linear(x[:, x.shape[1] - k if k else 0 :], weight[f : f + c], None if bias is None else bias[f : f + c])
        for f, c, k in chain
    ]


def gradients(make, chain, given, unused=()):
    x, weight, bias = leaves = [
        None if t is None else t.detach().clone().requires_grad_(t.requires_grad) for t in given
    ]
    assert x is not None
    made = make(chain, x * 2, weight, bias)
    sum((m * (i + 1)).sin().sum() for i, m in enumerate(made) if i not in unused).backward()
    return [m.detach() for m in made], [None if t is None else t.grad for t in leaves]


def inputs(shape, *, bias=True, frozen=()):
    g = torch.Generator().manual_seed(1)
    made = [torch.randn(s, generator=g, dtype=torch.float64) for s in (shape, (10, shape[-1]), (10,))]
    return [
        None if i == 2 and not bias else t.requires_grad_(i not in frozen) for i, t in enumerate(made)
    ]  # fmt: skip


def close(got, want):
    for a, b in zip(got[0], want[0], strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(got[1], want[1], strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "aot"])
@pytest.mark.parametrize("shape", [(2, 5, 3), (1, 4, 3)], ids=str)
@pytest.mark.parametrize("name", CHAINS)
def test_gradients_are_autograds(name, shape, compiled):
    def call(chain, x, weight, bias):
        return chained(chain, x, weight, bias)

    if compiled:
        call = torch.compile(call, backend=aot_autograd(fw_compiler=lambda m, _: m), fullgraph=True)
    given = inputs(shape, bias=name != "one")
    close(gradients(call, CHAINS[name], given), gradients(plain, CHAINS[name], given))


@pytest.mark.parametrize("frozen", [(1,), (2,), (1, 2)], ids=str)
def test_what_is_frozen_gets_no_gradient(frozen):
    chain = CHAINS["tail, conv and steps, gate"]
    given = inputs((2, 5, 3), frozen=frozen)
    close(gradients(chained, chain, given), gradients(plain, chain, given))


@pytest.mark.parametrize("unused", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)], ids=str)
def test_parts_that_nobody_reads(unused):
    chain = CHAINS["tail, conv and steps, gate"]
    given = inputs((2, 5, 3))
    close(gradients(chained, chain, given, unused), gradients(plain, chain, given, unused))


def test_under_autocast():
    chain = CHAINS["tail, conv and steps, gate"]
    given = [t.detach().float().requires_grad_() for t in inputs((2, 5, 3))]
    with torch.autocast("cpu", torch.bfloat16):
        got, want = gradients(chained, chain, given), gradients(plain, chain, given)
    assert got[0][0].dtype == torch.bfloat16
    for a, b in zip(got[1], want[1], strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)  # products rounded to 8 bits, summed in another order


def test_rows_that_are_written_twice_are_seen():
    chain = CHAINS["tail, conv and steps, gate"]
    given = inputs((2, 5, 3))
    got = gradients(lambda *a: chained(*a, wrong=True), chain, given)
    with pytest.raises(AssertionError):
        close(got, gradients(plain, chain, given))


def test_a_frozen_weight_keeps_no_input_alive():
    """As F.linear does: only the other factor of a product is kept."""
    chain = CHAINS["tail, conv and steps, gate"]
    kept = []
    x, weight, bias = inputs((2, 5, 3), frozen=(1,))

    def keep(tensor):
        kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        chained(chain, x * 2, weight, bias)
    assert kept.count(torch.Size((10, 3))) == 3 and torch.Size((2, 5, 3)) not in kept


def test_a_chain_that_ends_in_the_last_tokens_of_what_is_not_contiguous():
    chain = [(4, 6, 0), (0, 4, 2)]
    given = inputs((2, 5, 3))
    turned = given[0].detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    close(gradients(chained, chain, [turned, *given[1:]]), gradients(plain, chain, given))
