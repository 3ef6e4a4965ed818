"""``as_many_tokens`` and ``only_if``: values as they are, which a compiler must check, or must not know to be zeros."""

from __future__ import annotations

import pytest
import torch

from latentscan.ir.errors import MeshError
from latentscan.ir.ops.mask import as_many_tokens
from latentscan.ir.ops.opaque import only_if


@pytest.mark.parametrize("here", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_if_is_the_value_or_zeros(here, dtype):
    x = torch.randn(3, 2, 5, dtype=dtype).transpose(0, 1)
    x[0, 0, 0] = torch.nan  # what comes round a ring's wrong end is not multiplied by zero
    torch.library.opcheck(only_if, (torch.randn(2, 3), here))
    got = only_if(x, here)
    assert got.is_contiguous() and got.data_ptr() != x.data_ptr()
    torch.testing.assert_close(got, x if here else torch.zeros_like(x), equal_nan=True, rtol=0, atol=0)


def test_as_many_tokens():
    torch.library.opcheck(as_many_tokens.op, (torch.randn(2, 4, 3, requires_grad=True), torch.ones(2, 4)))
    x = torch.randn(1, 6, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: as_many_tokens.op(x, x.detach()[..., 0]), x)
    with pytest.raises(MeshError, match=r"an input of 6 tokens a row came with one of 5 .*split_batch"):
        as_many_tokens.op(x.detach(), torch.ones(1, 5))
