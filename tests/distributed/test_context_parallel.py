"""Context parallelism with real processes (gloo): losses and every gradient equal to one process, and sabotages."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

HYBRID = "pipeline=mamba-context-parallel,ulysses"
# fp32 sums over at most 24 tokens, 3 SGD steps and 2 layers: rounding is 1e-6 to 1e-5; every sabotage is over 1e-2.
TOLERANCE = 5e-5


def ranks(tmp_path, size: int, family: str, *words: str) -> list[dict]:
    """What each rank found; all output in the error if one fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    out = tmp_path / "out.json"
    base = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    command = [sys.executable, "-m", "latentscan.tests.distributed.context_parallel_worker", family, str(out), *words]
    logs = [(tmp_path / f"log{r}").open("w+") for r in range(size)]
    running = [
        subprocess.Popen(command, env=base | {"RANK": str(r)}, stdout=log, stderr=subprocess.STDOUT)
        for r, log in enumerate(logs)
    ]
    try:
        codes = [p.wait(timeout=300) for p in running]
    finally:
        for p in running:
            p.kill()
    if any(codes):
        text = []
        for log in logs:
            log.seek(0)
            text.append(log.read()[-1500:])
        pytest.fail("\n".join(text))
    return json.loads(out.read_text())


def check(found: list[dict]) -> None:
    assert all(f["names"] for f in found)
    assert max(f["loss"] for f in found) < TOLERANCE
    assert max(f["gradient"] for f in found) < TOLERANCE, found[0]["where"]


@pytest.mark.parametrize("words", [(), ("packed",), ("pad",)])
def test_two_ranks_train_mamba2_as_one_process_does(tmp_path, words):
    check(ranks(tmp_path, 2, "mamba2", *words))


PIPELINES = {
    "cp": HYBRID,
    "tp": "pipeline=tensor-parallel,mamba-context-parallel,ulysses",
    "sp": "pipeline=tensor-parallel,sequence-parallel,mamba-context-parallel,ulysses",
    "scan": "pipeline=mamba-context-parallel{algorithm=log-scan}",
    "gather": "pipeline=mamba-context-parallel{algorithm=all-gather}",
    "mamba": "pipeline=mamba-context-parallel",
}
# Attention heads, and their KV heads, that three ranks can share.
SIX = {
    "bamba": {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16},
    "nemotron_h": {"num_attention_heads": 6, "num_key_value_heads": 3},
    "falcon_h1": {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16},
    "zamba2": {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 6},
}
TWO_BY_TWO = "mesh=cp=2,tp=2"


@pytest.mark.slow
@pytest.mark.parametrize("packed", [(), ("packed",)])
@pytest.mark.parametrize(("size", "how"), [(3, "scan"), (4, "scan"), (4, "gather"), (3, "mamba")])
def test_mamba2_on_three_and_four_ranks(tmp_path, size, how, packed):
    check(ranks(tmp_path, size, "mamba2", PIPELINES[how], *packed))


@pytest.mark.slow
@pytest.mark.parametrize("groups", [2, 1])  # one: all ranks of tp hold B and C, and exchange their own heads' states
@pytest.mark.parametrize("how", ["tp", "sp"])
def test_mamba2_on_two_by_two_ranks(tmp_path, how, groups):
    given = f'set={{"n_groups": {groups}}}'
    check(ranks(tmp_path, 4, "mamba2", TWO_BY_TWO, PIPELINES[how].removesuffix(",ulysses"), given))


@pytest.mark.slow
@pytest.mark.parametrize("family", SIX)
@pytest.mark.parametrize("words", [(2, "cp"), (2, "cp", "packed"), (3, "cp"), (4, "cp"), (4, "tp"), (4, "sp")])
def test_hybrids_train_as_one_process_does(tmp_path, family, words):
    size, how, *packed = words
    given = [PIPELINES[how], *packed, *([TWO_BY_TWO] if how != "cp" else [])]
    if size == 3:
        given.append(f"set={json.dumps(SIX[family])}")
    check(ranks(tmp_path, size, family, *given))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "family", "words"),
    [
        (2, "llama", ("pipeline=ulysses",)),
        (4, "llama", ("pipeline=ulysses",)),  # KV heads go to two ranks each
        (2, "granitemoehybrid", (HYBRID,)),  # the router looks at one token at a time
        (4, "granitemoehybrid", (PIPELINES["sp"], TWO_BY_TWO)),  # and each rank of tp has two experts
        (2, "deepseek_v3", ("pipeline=ulysses",)),  # the latent is gathered
        (4, "deepseek_v3", ("pipeline=mla-mm-split,ulysses",)),
        (2, "deepseek_v3", ("pipeline=mla-absorb{when=always},ulysses",)),
        (2, "deepseek_v3", ("pipeline=mla-zero-memory,ulysses",)),
        (2, "llama", ("pipeline=mla-zero-memory,ulysses",)),
    ],
)
def test_attention_models_and_mixtures(tmp_path, size, family, words):
    check(ranks(tmp_path, size, family, *words))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mamba2", "bamba"])
def test_all_axes_of_a_mesh_together(tmp_path, family):
    """dp x cp x tp with sequence parallelism on 8 processes, DistributedDataParallel around it."""
    pipeline = PIPELINES["sp"] if family == "bamba" else PIPELINES["sp"].removesuffix(",ulysses")
    check(ranks(tmp_path, 8, family, pipeline, "mesh=dp=2,cp=2,tp=2"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "family", "words"),
    [
        (2, "bamba", ("pad",)),
        (2, "bamba", ("pad", "packed")),
        (4, "mamba2", ("pad", "packed")),  # of 24 tokens one is padding: the last rank has 5 of its 6 trained
        (2, "granitemoehybrid", ("pad",)),
        (2, "deepseek_v3", ("pad", "pipeline=ulysses")),
        (2, "llama", ("pad", "pipeline=ulysses")),
    ],
)
def test_padding_changes_neither_loss_nor_gradients(tmp_path, size, family, words):
    """23 tokens, filled up by split_batch, against one process that is given the 23."""
    check(ranks(tmp_path, size, family, *([HYBRID] if family in ("bamba", "granitemoehybrid") else []), *words))


@pytest.mark.slow
@pytest.mark.parametrize("dropped", ["copy_to", "sum_partial", "tail", "state"])
def test_a_dropped_collective_is_seen(tmp_path, dropped):
    found = ranks(tmp_path, 2, "mamba2", f"drop={dropped}")
    assert max(max(f["loss"], f["gradient"]) for f in found) > 1e-2
