"""MODEL: every kind that is served, and one clear message for everything else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from latentscan.ir.errors import CheckpointError, LatentscanError, PipelineError, RefusedError
from latentscan.runtime.source import MARKER, resolve
from latentscan.tests.models import build

DEEPSEEK = Path(__file__).parents[1] / "data" / "deepseek_v3"


def folder_with(tmp_path: Path, text: str) -> str:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    return str(tmp_path)


def test_a_directory_is_planned_on_meta_and_loads_its_weights(tmp_path):
    model = build("llama")
    model.save_pretrained(tmp_path)
    source = resolve(str(tmp_path))
    planned = source.on_meta()
    assert {p.device.type for p in planned.parameters()} == {"meta"}
    loaded = source.load()
    assert not loaded.training
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, loaded.get_parameter(name))


@pytest.mark.parametrize("path", [DEEPSEEK, DEEPSEEK / "config.json"])
def test_a_configuration_without_weights_is_planned_only(path):
    source = resolve(str(path))
    model = source.on_meta()
    assert sum(p.numel() for p in model.parameters()) == 671_026_404_352
    assert next(model.parameters()).dtype == torch.bfloat16
    with pytest.raises(CheckpointError, match=r"no file named|no weights"):
        source.load()


def test_a_tiny_model_is_the_same_every_time_and_takes_values():
    again = [resolve("tiny:llama{num_hidden_layers=1, tie_word_embeddings=true}").load() for _ in range(2)]
    assert again[0].config.num_hidden_layers == 1
    assert again[0].lm_head.weight is again[0].model.embed_tokens.weight
    for a, b in zip(*(m.parameters() for m in again), strict=True):
        assert torch.equal(a, b)


def test_a_quantised_checkpoint_is_planned_in_plain_weights_and_not_loaded(tmp_path):
    config = json.loads((DEEPSEEK / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    source = resolve(folder_with(tmp_path, json.dumps(config)))
    assert source.on_meta().lm_head.weight.dtype == torch.bfloat16
    assert source.notes == ("the checkpoint is quantised (fp8); figures are for plain bfloat16 weights",)
    with pytest.raises(RefusedError, match=r"weights are quantised \(fp8\)"):
        source.load()


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes"])
def test_packed_weights_are_refused_before_anything_is_planned(tmp_path, method):
    config = build("llama").config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 64, "load_in_4bit": True}
    with pytest.raises(RefusedError, match=rf"quantised \({method}\): the layers have no plain weight"):
        resolve(folder_with(tmp_path, json.dumps(config, default=str)))


def test_a_converted_directory_says_so(tmp_path):
    build("llama").save_pretrained(tmp_path)
    (tmp_path / MARKER).write_text("{}")
    source = resolve(str(tmp_path))
    assert "before conversion" in source.notes[0]
    with pytest.raises(RefusedError, match="converted by latentscan already"):
        source.load()


@pytest.mark.parametrize(
    ("config", "kind", "words"),
    [
        ("{ not json", CheckpointError, "is not valid JSON"),
        ("[]", CheckpointError, "names no model_type"),
        ('{"model_type": "nobody"}', CheckpointError, "nobody"),
        ('{"model_type": "llama", "hidden_size": "wide"}', CheckpointError, "hidden_size"),
        ('{"model_type": "vit"}', RefusedError, "vit is not a causal language model"),
        (
            '{"model_type": "bert", "architectures": ["BertForMaskedLM"]}',
            RefusedError,
            "BertForMaskedLM is not a causal language model",
        ),
        ('{"model_type": "t5", "is_encoder_decoder": true}', RefusedError, "encoder-decoder"),
    ],
)
def test_a_wrong_configuration_is_one_clear_error(tmp_path, config, kind, words):
    folder = folder_with(tmp_path, config)
    with pytest.raises(kind, match=words) as caught:
        resolve(folder)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("/nowhere/at/all", CheckpointError, "there is no such directory"),
        ("./nowhere", CheckpointError, "there is no such directory"),
        ("nobody/no-such-model", CheckpointError, "no model of that name in the local cache"),
        ("/nowhere/model.gguf", CheckpointError, "there is no such file"),
        ("/nowhere/config.json", CheckpointError, "there is no such file"),
        ("tiny:lama", CheckpointError, "did you mean llama"),
        ("tiny:llama{num_hidden_layers=many}", CheckpointError, "num_hidden_layers"),
        ("tiny:llama{num_hidden_layers}", PipelineError, "has no value"),
        ("tiny:llama{", CheckpointError, "cannot be read"),
    ],
)
def test_what_is_not_there_is_one_clear_error(text, kind, words):
    with pytest.raises(kind, match=words) as caught:
        resolve(text)
    assert "\n" not in str(caught.value)


def test_other_files_are_no_models(tmp_path):
    (tmp_path / "broken.gguf").write_bytes(b"nothing of the kind")
    with pytest.raises(CheckpointError, match="GGUF"):
        resolve(str(tmp_path / "broken.gguf"))
    with pytest.raises(CheckpointError, match=r"no config.json. Give .*broken.gguf"):
        resolve(str(tmp_path))
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(CheckpointError, match="this is no model"):
        resolve(str(tmp_path / "notes.txt"))


def test_missing_and_truncated_weights_are_one_clear_error(tmp_path):
    model = build("llama")
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    for _ in range(2):  # truncated, then gone
        with pytest.raises(LatentscanError, match="the weights cannot be read") as caught:
            resolve(str(tmp_path)).load()
        assert "\n" not in str(caught.value)
        shard.unlink(missing_ok=True)
    from safetensors.torch import load_file, save_file

    for path in tmp_path.glob("model*"):
        path.unlink()
    state = {k: v for k, v in model.state_dict().items() if "layers.1.mlp.up_proj" not in k}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert len(load_file(tmp_path / "model.safetensors")) == len(state)
    with pytest.raises(CheckpointError, match=r"1 weights are missing, model.layers.1.mlp.up_proj.weight first"):
        resolve(str(tmp_path)).load()
