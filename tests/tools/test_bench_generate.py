"""bench generate: tokens a second of both phases, bytes of the states; wrong input is one line and status 2."""

from __future__ import annotations

import json

import pytest

from latentscan.ir.errors import PipelineError
from latentscan.runtime.tiny import tiny_config
from latentscan.tools.bench_generate import generate, lines
from latentscan.tools.cli import main


def state_bytes(batch: int) -> int:
    """Of tiny:mamba2 by its sizes: 2 layers, 8 heads x 16 x 16 and 192 channels x 4 inputs, fp32."""
    return 2 * batch * 4 * (8 * 16 * 16 + 192 * 4)


@pytest.mark.parametrize("pipeline", ["", pytest.param("fuse-mamba", marks=pytest.mark.slow)])
def test_figures_of_a_tiny_model(capsys, pipeline):
    arguments = ["tiny:mamba2", "--prompt", "17", "--new", "4", "--batch", "3", "--device", "cpu", "-p", pipeline]
    assert main(["bench", "generate", *arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["schema"], told["prompt"], told["new"], told["batch"]) == (1, 17, 4, 3)
    assert told["bytes"] == {"states": state_bytes(3), "states_per_row": state_bytes(1), "cache": state_bytes(3)}
    prefill, decode = told["prefill"], told["decode"]
    assert prefill["tokens_per_second"] == pytest.approx(3 * 17 / prefill["ms"] * 1e3)
    assert decode["tokens_per_second"] == pytest.approx(3 / decode["ms_per_step"] * 1e3)
    assert 0 < decode["ms_per_step"] <= decode["slowest_ms"]
    assert told["peak_bytes"] is None
    text = "\n".join(lines(told))
    assert f"{state_bytes(3):,} bytes" in text
    assert "tokens/s" in text


@pytest.mark.slow
def test_a_hybrid_keeps_states_and_a_cache_that_grows():
    told = [generate("tiny:zamba2", prompt=n, new=2, device="cpu") for n in (8, 16)]
    assert told[0]["bytes"]["states"] == told[1]["bytes"]["states"]
    assert told[0]["bytes"]["cache"] < told[1]["bytes"]["cache"]


@pytest.mark.slow
def test_a_bare_configuration_gets_random_weights(tmp_path):
    path = tmp_path / "config.json"
    config = tiny_config("mamba2")
    config.architectures = ["Mamba2ForCausalLM"]
    path.write_text(config.to_json_string())
    told = generate(str(path), prompt=5, new=2, device="cpu", dtype="bfloat16")
    assert told["notes"][-1] == "random weights"
    assert told["dtype"] == "bfloat16"


def test_wrong_input_is_told_in_one_line(capsys):
    for arguments, words in (
        (["tiny:mamba2", "--dtype", "int3"], "no dtype 'int3'"),
        (["tiny:mamba2", "--device", "tpu"], "no device 'tpu'"),
        (["tiny:mamba3x"], "no tiny model"),
        (["tiny:mamba2", "-p", "fuse-mambo"], "no pass 'fuse-mambo'"),
        (["tiny:mamba2", "--new", "1"], "--new"),
    ):
        assert main(["bench", "generate", *arguments]) == 2
        told = capsys.readouterr().err
        assert words in told
        assert "Traceback" not in told
    with pytest.raises(PipelineError):
        generate("tiny:mamba2", prompt=2, new=2, dtype="fp8")
