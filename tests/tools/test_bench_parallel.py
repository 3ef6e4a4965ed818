"""bench parallel: bad calls are told at once; two gloo ranks measure every variant, and one process counts any mesh."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from latentscan.ir.errors import LatentscanError
from latentscan.tools.bench_models import CLASSES, config_of
from latentscan.tools.bench_parallel import VARIANTS, Case, bench_parallel, count_parallel


@pytest.mark.parametrize(
    ("case", "text"),
    [
        (Case("tiny:llama", "tp=2", "tensor-parallel"), "mesh tp=2 has 2 ranks, and 1 processes were started"),
        (Case("tiny:llama", "tp=2", "mla-absorb"), "no pass of 'mla-absorb' uses a mesh"),
        (Case("tiny:llama", "cp=3", "ulysses", seq=32), "32 tokens cannot be shared evenly by mesh cp=3"),
        (Case("tiny:llama", "tp=2", "tensor-parallel", variants=("two",)), "variants='two' is not one of one, plain"),
        (Case("tiny:llama", "tp=2", "tensor-parallel", recompute="half"), "recompute='half' is not one of none, full"),
        (Case("llama-7b", "tp=2", "tensor-parallel", layers=33), "the model has 32 layers, not 33"),
    ],
)
def test_a_bad_call_is_told(case, text):
    with pytest.raises(LatentscanError, match=text):
        count_parallel(case) if case.layers else bench_parallel(case)


def test_classes_have_the_shapes_of_their_models():
    assert config_of("nemotron-h-8b", 8).layers_block_type[-1].endswith("attention")
    for name in CLASSES:
        assert config_of(name, 3).num_hidden_layers == 3
    assert config_of("tiny:bamba", 1).num_hidden_layers == 1


def test_one_process_counts_a_mesh_of_many_ranks():
    told = count_parallel(Case("tiny:llama", "tp=2,dp=4", "tensor-parallel,sequence-parallel", seq=64, batch=4))
    assert len(told["ranks"]) == 8
    assert told["forward"]["collectives"] == 10
    assert told["backward"]["between"][1] > told["backward"]["between"][0] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "pipeline", "model"),
    [
        ("tp=2", "tensor-parallel,sequence-parallel", "tiny:llama"),
        ("tp=2,dp=2", "tensor-parallel", "tiny:bamba"),
    ],
)
def test_ranks_measure_every_variant(mesh, pipeline, model, tmp_path):
    size = 4 if "dp" in mesh else 2
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), "-m"]
    command += ["latentscan.tools.cli", "bench", "parallel", model, "--mesh", mesh, "-p", pipeline, "--seq", "32"]
    command += ["--batch", "2", "--steps", "2", "--warmup", "1", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900, env=dict(os.environ))
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert tuple(told["variants"]) == tuple(sorted(VARIANTS))
    assert max(told["parity"].values()) < 1e-4
    assert set(told["exposed"]) == set(told["speedup"]) == {"plain", "overlap"}
    assert told["variants"]["overlap"]["scheduled"][1]["after"] > 0
    assert told["variants"]["plain"]["scheduled"] == []
    half = told["variants"]["overlap"]["weight_bytes"][0] / told["variants"]["one"]["weight_bytes"][0]
    assert 0.45 < half < 0.6
