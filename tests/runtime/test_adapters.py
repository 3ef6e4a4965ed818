"""Models and directories with adapters that are not merged are refused, wherever they come in."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest
import torch
from torch import nn

from latentscan.ir.errors import RefusedError
from latentscan.runtime.adapters import adapter_in
from latentscan.runtime.source import resolve
from latentscan.runtime.wrap import wrap
from latentscan.tests.models import FAMILIES, build
from latentscan.tools.cli import BAD_INPUT, main

EXACT = "mha-to-mla,latent-cache"


class Adapted(nn.Module):
    """A linear layer with LoRA, built as peft builds it."""

    adapter_layer_names = ("lora_A", "lora_B")

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base.out_features, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class Scaled(nn.Module):
    """A method that names its parameter otherwise (as (IA)^3 does)."""

    adapter_layer_names = ("ia3_l",)

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.ia3_l = nn.ParameterDict({"default": nn.Parameter(torch.ones(inner.out_features))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.ia3_l["default"]


class Loose(nn.Linear):
    """A linear layer that is its own base (as loralib's is)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, bias=False)
        self.lora_A, self.lora_B = nn.Parameter(torch.ones(2, base.in_features)), nn.Parameter(torch.ones(1, 2))


@pytest.mark.parametrize("kind", [Adapted, Scaled, Loose])
@pytest.mark.parametrize("place", ["self_attn.k_proj", "mlp.up_proj"])
def test_an_adapter_anywhere_is_refused_with_its_place_and_the_remedy(kind, place):
    model = build("llama")
    assert adapter_in(model) is None
    layer = model.model.layers[1]
    parent, name = place.split(".")
    setattr(getattr(layer, parent), name, kind(getattr(getattr(layer, parent), name)))
    with pytest.raises(RefusedError, match=rf"unmerged adapters \(the first at model.layers.1.{place}") as caught:
        wrap(model, EXACT)
    assert "merge_and_unload" in caught.value.remedy
    assert "report" not in model.__dict__  # it is as it was


QUICK = ("llama", "deepseek_v3", "zamba2")  # zamba2 has adapters of its own, which are plain weights


@pytest.mark.parametrize("family", [f if f in QUICK else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES])
def test_no_family_is_taken_for_one_with_adapters(family):
    assert adapter_in(resolve(f"tiny:{family}").on_meta()) is None


def test_sabotage_without_the_check_the_adapter_would_go_unnoticed(monkeypatch):
    """An exact pipeline even gives the right numbers: only the look at the structure refuses."""
    monkeypatch.setattr("latentscan.runtime.models.refuse_adapters", lambda model: None)
    model = build("llama", num_hidden_layers=1)
    model.model.layers[0].self_attn.o_proj = Adapted(model.model.layers[0].self_attn.o_proj)
    wrap(model, EXACT)


@pytest.fixture(params=["adapter alone", "adapter beside a model"])
def adapter_directory(request, tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    if request.param != "adapter alone":
        build("llama", num_hidden_layers=1).save_pretrained(folder)
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": "somewhere", "r": 8})
    )
    return folder


@pytest.mark.parametrize("verb", ["plan", "convert", "dump"])
def test_the_command_refuses_an_adapter_directory(adapter_directory, tmp_path, capsys, verb):
    places: dict[str, list[Any]] = {"plan": [], "convert": [tmp_path / "new"], "dump": ["--out", tmp_path / "new"]}
    status = main([verb, str(adapter_directory), *map(str, places[verb]), "-p", EXACT])
    told = capsys.readouterr()
    assert status == BAD_INPUT and told.err.count("\n") == 1 and not told.out
    assert "holds an unmerged adapter (adapter_config.json)" in told.err and "merge_and_unload" in told.err
    assert not (tmp_path / "new").exists()


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="the package peft is not installed")
@pytest.mark.parametrize("way", ["get_peft_model", "add_adapter", "merged"])
def test_real_peft_models_are_refused_until_they_are_merged(way):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model: Any = build("llama")
    if way == "add_adapter":
        try:
            model.add_adapter(config)
        except ValueError as error:  # transformers asks for a newer one
            pytest.skip(str(error))
    else:
        model = peft.get_peft_model(model, config)
    if way == "merged":
        model = model.merge_and_unload()
        ids = torch.randint(3, 100, (2, 7))
        with torch.no_grad():
            want = model(input_ids=ids).logits
            got = wrap(model, EXACT)(input_ids=ids).logits
        assert float((got - want).abs().max()) < 1e-5
        return
    with pytest.raises(RefusedError, match="unmerged adapters"):
        wrap(model, EXACT)
