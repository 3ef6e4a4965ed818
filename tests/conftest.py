"""What every test shares: one torch thread a process, no hub, repeatable hypothesis examples, a fresh Dynamo."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator

import hypothesis
import pytest

# Before torch is imported, and inherited by worker processes: test processes share the cores, threads fight over them.
for _name, _value in {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}.items():
    os.environ.setdefault(_name, _value)

hypothesis.settings.register_profile(
    "latentscan",
    deadline=None,  # the first example compiles
    derandomize=True,
    max_examples=25,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("latentscan")


# What fails with an older transformers because of the library itself: (before this version, test, reason).
OLDER = [
    ("5.24", r"test_capture.*every_shape\[opt-", "its OPT branches on a random tensor, which no trace can follow"),
    ("5.24", r"test_training.*draws_as_eager_does\[opt-", "its OPT branches on a random tensor"),
    ("5.24", r"test_capture.*every_shape\[bloom-", "its BLOOM cuts the padding mask itself: one op more than listed"),
    (
        "5.24",
        r"test_export.*(read_the_export\[.*(low rank|GQA, exact)|converts_and_what)",
        "its LongRoPE branches on data",
    ),
    ("5.24", r"test_wrap_generate.*chunked-prefill", "its generate makes one more kind of call for chunks"),
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, what an older library cannot do."""
    import importlib.metadata
    import re

    have = tuple(int(n) for n in re.findall(r"\d+", importlib.metadata.version("transformers"))[:2])
    for before, test, why in OLDER:
        if have >= tuple(int(n) for n in before.split(".")):
            continue
        for item in items:
            if re.search(test, item.nodeid):
                item.add_marker(pytest.mark.skip(reason=f"transformers before {before}: {why}"))


def pytest_collection_finish() -> None:
    """One thread, also where something imported torch before this file was read."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """No test sees what another one compiled."""
    yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()


def missing_device(kind: str = "cuda", count: int = 1, *, found: Callable[[str], int] | None = None) -> str | None:
    """Why a test marked ``device(kind, count)`` cannot run here; None if it can.

    Args:
        kind: ``"cuda"`` or ``"npu"``.
        count: how many of them the test needs.
        found: how many of a kind there are; asked of torch when left out.
    """
    there = (found or _count)(kind)
    return None if there >= count else f"needs {count} {kind} device{'s' * (count != 1)}, found {there}"


def _count(kind: str) -> int:
    import torch

    if kind == "npu":
        try:
            import torch_npu  # noqa: F401  (adds torch.npu)
        except ImportError:
            return 0
    elif kind != "cuda":
        raise ValueError(f"unknown device kind {kind!r} in a device mark: cuda or npu")
    module = getattr(torch, kind)
    return module.device_count() if module.is_available() else 0


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("device"):
        if reason := missing_device(*mark.args, **mark.kwargs):
            pytest.skip(reason)
