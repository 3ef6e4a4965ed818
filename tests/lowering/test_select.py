"""A pipeline may end with the target that its graph is lowered to."""

from __future__ import annotations

import pytest

from latentscan.ir.errors import PipelineError
from latentscan.lowering.select import split_target
from latentscan.passes.pipeline import parse
from latentscan.runtime.options import Options
from latentscan.tools.cli import main


@pytest.mark.parametrize(
    ("text", "passes", "target"),
    [
        ("", "", "auto"),
        ("latent-cache,mla-absorb", "latent-cache,mla-absorb", "auto"),
        ("lower{target=ascend}", "", "ascend"),
        ("latent-cache, mla-absorb , lower { target = triton } ", "latent-cache, mla-absorb ", "triton"),
        ("mha-to-mla{rank=4},lower{target=auto}", "mha-to-mla{rank=4}", "auto"),
        ("lowrank-lower{target=ascend}", "lowrank-lower{target=ascend}", "auto"),
    ],
)
def test_the_last_step_names_the_target(text: str, passes: str, target: str):
    assert split_target(text) == (passes, target)


@pytest.mark.parametrize(
    ("text", "target", "told"),
    [
        ("lower", "auto", "given none"),
        ("lower{}", "auto", "given none"),
        ("lower{chip=950}", "auto", "given chip=950"),
        ("lower{target=ascend,chip=950}", "auto", "given target=ascend,chip=950"),
        ("lower{target=ascend,target=ascend}", "auto", "one option"),
        ("lower{target=tpu}", "auto", "no target 'tpu'. Use one of: auto, reference, triton, ascend"),
        ("lower{target=reference}", "ascend", r"ends with lower\{target=reference\}, and target=ascend is given"),
    ],
)
def test_wrong_ones_are_told(text: str, target: str, told: str):
    with pytest.raises(PipelineError, match=told):
        split_target(text, target)


def test_it_is_the_same_as_the_option():
    made = Options.of({"pipeline": "latent-cache,lower{target=reference}"})
    assert (made.pipeline, made.target) == ("latent-cache", "reference")
    assert made == Options.of({"pipeline": "latent-cache", "target": "reference"})
    with pytest.raises(PipelineError, match="target=ascend cannot run here"):
        Options.of({"pipeline": "lower{target=ascend}"})
    elsewhere = Options.of({"pipeline": "lower{target=reference},latent-cache"}).pipeline
    with pytest.raises(PipelineError, match="there is no pass 'lower'"):
        parse(elsewhere)


def test_the_command_takes_it(tmp_path, capsys):
    assert main(["emit", "tiny:mamba2", "--out", str(tmp_path / "out"), "-p", "lower{target=ascend}"]) == 0
    assert main(["plan", "tiny:llama", "-p", "lower{target=ascend}"]) == 0
    capsys.readouterr()
    assert main(["emit", "tiny:mamba2", "--out", str(tmp_path / "no"), "-p", "lower{target=triton}"]) == 2
    assert main(["plan", "tiny:llama", "-p", "lower{target=asscend}"]) == 2
    assert "Traceback" not in capsys.readouterr().err and not (tmp_path / "no").exists()
