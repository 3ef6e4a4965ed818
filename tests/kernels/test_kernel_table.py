"""Every shipped choice of the chunk scan compiles for its architectures, fits, and is what docs/kernels.md says."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import triton

from latentscan.kernels.triton import aot, chunk_common
from latentscan.tests import kernel_table


@pytest.mark.slow
@pytest.mark.parametrize("architecture", kernel_table.DEVICES)
@pytest.mark.parametrize("name", kernel_table.CLASSES)
def test_shipped_choices_compile_fit_and_are_as_the_page_says(name, architecture):
    kernels = kernel_table.compiled(name, architecture)
    assert {"prep_kernel", "output_kernel", "walk_kernel", "chunk_kernel"} <= {k.kernel for k in kernels}
    too_much = [k for k in kernels if k.shared > kernel_table.SHARED[architecture]]
    assert not too_much
    # Beyond this it is no spill: ptxas gave up and kept everything on the stack.
    assert not [k for k in kernels if k.spill > 3000]
    page = kernel_table.PAGE.read_text(encoding="utf-8")
    if f"Triton {triton.__version__}:" in page:
        part = page.split(f"## {name}\n")[1].split("\n## ")[0]
        missing = [row for row in kernel_table.rows(architecture, kernels) if row not in part]
        assert not missing, "run python -m latentscan.tests.kernel_table"


def test_the_page_holds_every_class_and_architecture():
    page = kernel_table.PAGE.read_text(encoding="utf-8")
    for name in kernel_table.CLASSES:
        part = page.split(f"## {name}\n")[1].split("\n## ")[0]
        assert all(f"| {architecture} | chunk |" in part for architecture in kernel_table.DEVICES)
    assert "| output_gluon |" in page
    assert "| pulls |" in page


def test_one_kernel_is_compiled_as_it_would_be_launched():
    from latentscan.kernels.triton.chunk_scan_forward import carry_kernel

    sizes, dtype, _ = kernel_table.CLASSES["Mamba-2 2.7B: H 80, P 64, G 1, N 128, bf16"]
    x = kernel_table.meta(sizes, dtype, ())["A"]

    def run() -> None:
        for S in (16, 16, 7):  # a multiple of 16 is compiled apart, once
            chunk_common.launch(carry_kernel, 4, x, x, 80, S, 8192, BLOCK=1024, num_warps=4)

    found = aot.compile_launches(run, 80)
    assert [(k.kernel, k.warps) for k in found] == [("carry_kernel", 4)] * 2
    assert all(0 < k.registers <= 255 and k.spill == 0 for k in found)


def test_a_kernel_that_does_not_compile_is_an_error():
    from latentscan.kernels.triton.chunk_scan_forward import carry_kernel

    x = kernel_table.meta((1, 1, 1, 1, 1), kernel_table.torch.float32, ())["A"]
    with pytest.raises(Exception, match=r"(?i)power of 2|arange"):
        aot.compile_launches(lambda: chunk_common.launch(carry_kernel, 1, x, x, 8, 7, 9, BLOCK=1000, num_warps=4), 80)
    assert chunk_common.recorder is None
