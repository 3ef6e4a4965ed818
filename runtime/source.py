"""MODEL as the command takes it: a directory, a ``config.json``, a ``.gguf`` file, ``tiny:FAMILY`` or a hub id."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from latentscan.ir.errors import CheckpointError, PipelineError, RefusedError
from latentscan.runtime.adapters import refuse_adapter_directory
from latentscan.runtime.models import check_model
from latentscan.runtime.tiny import build, choose_experts, tiny_config

MARKER = "latentscan.json"  # in a directory that a wrapped model was saved to
_HEADS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_REMEDY = "give a model directory, a config.json, a .gguf file, tiny:FAMILY, or a hub id that is in the local cache"


@dataclass(frozen=True)
class Source:
    """Where a model comes from.

    Attributes:
        text: what the user wrote.
        config: the Hugging Face configuration.
        folder: what ``from_pretrained`` takes: a directory or a hub id; None for tiny models and bare configurations.
        gguf: the name of a GGUF file in ``folder``.
        family, overrides: of a tiny model.
        notes: what the user should know.
    """

    text: str
    config: Any
    folder: str | None = None
    gguf: str | None = None
    family: str | None = None
    overrides: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def has_weights(self) -> bool:
        """Whether :meth:`load` may find any."""
        return self.folder is not None or self.family is not None

    @property
    def lasting(self) -> str:
        """What finds this model again from any directory: paths are made absolute."""
        return os.path.abspath(self.text) if os.path.exists(self.text) else self.text

    def on_meta(self) -> torch.nn.Module:
        """The model without weights, in evaluation mode, for planning.

        Raises:
            RefusedError: it is not a causal language model of a served kind. CheckpointError: it cannot be built.
        """
        from transformers import AutoModelForCausalLM

        try:
            with quiet(), torch.device("meta"):
                model = AutoModelForCausalLM.from_config(self.config).eval()
        except Exception as error:
            raise CheckpointError(
                f"the configuration makes no model: {type(error).__name__}: {one_line(error)}",
                where=self.text,
                remedy="check the configuration",
            ) from error
        check_model(model)
        choose_experts(model)
        return model

    def load(self) -> torch.nn.Module:
        """The model with its weights, in evaluation mode.

        Raises:
            RefusedError: it is of a kind that is not served, or its weights are quantised.
            CheckpointError: there are no weights, or they cannot be read.
        """
        if self.family is not None:
            return build(self.family, **self.overrides)
        if self.folder is None:
            raise CheckpointError("there are no weights here", where=self.text, remedy="give the model's directory")
        if (method := quantisation(self.config)) and not self.gguf:
            raise RefusedError(
                f"its weights are quantised ({method})", where=self.text, remedy="dequantise the checkpoint first"
            )
        if os.path.isfile(os.path.join(self.folder, MARKER)):
            raise RefusedError(
                "it was converted by latentscan already", where=self.text, remedy="read it with latentscan.load"
            )
        from transformers import AutoModelForCausalLM

        options: dict[str, Any] = {"dtype": "auto", "output_loading_info": True}
        if self.gguf:
            options |= {"gguf_file": self.gguf, "dtype": torch.float32}
        try:
            with quiet():
                model, info = AutoModelForCausalLM.from_pretrained(self.folder, **options)
        except Exception as error:
            raise CheckpointError(
                f"the weights cannot be read: {type(error).__name__}: {one_line(error)}", where=self.text,
                remedy="check that the directory is complete",
            ) from error  # fmt: skip
        if missing := sorted(info["missing_keys"]):
            raise CheckpointError(
                f"{len(missing)} weights are missing, {missing[0]} first", where=self.text,
                remedy="check that the directory is complete",
            )  # fmt: skip
        if self.gguf and getattr(model, "hf_quantizer", None) is not None:  # the weights are plain by now
            model.hf_quantizer.remove_quantization_config(model)
        check_model(model)
        choose_experts(model)
        return model.eval()


def resolve(text: str) -> Source:
    """What MODEL names. Reads the configuration only.

    Raises:
        CheckpointError: nothing is there, or it cannot be read.
        RefusedError: it is an encoder-decoder model, or has no language-model head.
    """
    if text.startswith("tiny:"):
        return _tiny(text)
    if not text.strip():
        raise CheckpointError("MODEL is empty", remedy="give a directory, a config.json, a .gguf or tiny:FAMILY")
    path = Path(text)
    try:
        path.stat()
    except ValueError as error:  # a zero byte
        raise CheckpointError(str(error), where=repr(text)[:200], remedy=_REMEDY) from None
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.EACCES, errno.EIO):
            raise CheckpointError(
                f"cannot be read: {(error.strerror or '').lower()}", where=text[:200], remedy=_REMEDY
            ) from None
    if text.endswith(".gguf"):
        _must_exist(path, text)
        return _checked(Source(text, _config(text, str(path.parent), path.name), str(path.parent), path.name))
    if path.name == "config.json" and not path.is_dir():
        _must_exist(path, text)
        refuse_adapter_directory(str(path.parent), text)
        return _checked(Source(text, _config(text, str(path.parent))))
    if path.is_dir():
        refuse_adapter_directory(text, text)
        if not (path / "config.json").is_file():
            found = sorted(p.name for p in path.glob("*.gguf"))
            remedy = f"give {path / found[0]}" if found else "give the directory that holds the model's config.json"
            raise CheckpointError("the directory holds no config.json", where=text, remedy=remedy)
        return _checked(Source(text, _config(text, text), text))
    if path.is_absolute() or text.startswith(".") or text.count("/") > 1 or path.exists():
        raise CheckpointError(
            "there is no such directory" if not path.exists() else "this is no model", where=text, remedy=_REMEDY
        )
    return _checked(Source(text, _config(text, text), text))


def _must_exist(path: Path, text: str) -> None:
    if not path.is_file():
        raise CheckpointError("there is no such file", where=text, remedy=_REMEDY)


def _tiny(text: str) -> Source:
    match = re.fullmatch(r"tiny:([\w-]*)(?:\{(.*)\})?", text)
    if match is None:
        raise CheckpointError(
            "cannot be read", where=text, remedy="write tiny:FAMILY or tiny:FAMILY{name=value,name=value}"
        )
    overrides: dict[str, Any] = {}
    for part in (match.group(2) or "").split(","):
        if not part.strip():
            continue
        name, equals, value = part.partition("=")
        if not equals:
            raise PipelineError(f"{part.strip()!r} has no value", where=text, remedy="write name=value")
        try:
            overrides[name.strip()] = json.loads(value)
        except ValueError:
            overrides[name.strip()] = value.strip()
    family = match.group(1)
    try:
        config = tiny_config(family, **overrides)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{type(error).__name__}: {one_line(error)}", where=text, remedy="check the values"
        ) from error
    return _checked(Source(text, config, family=family, overrides=overrides))


def _config(text: str, folder: str, gguf: str | None = None) -> Any:
    """The configuration in a directory, or of a hub id."""
    from transformers import AutoConfig

    path = os.path.join(folder, "config.json")
    if gguf is None and os.path.isfile(path):
        try:
            with open(path, encoding="utf-8") as file:
                known = json.load(file)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"is not valid JSON: {one_line(error)}", where=path, remedy="restore the file"
            ) from None
        if not isinstance(known, dict) or "model_type" not in known:
            raise CheckpointError("names no model_type", where=path, remedy="give a Hugging Face config.json")
    try:
        with quiet():
            return AutoConfig.from_pretrained(folder, **({"gguf_file": gguf} if gguf else {}))
    except Exception as error:
        if gguf is not None:
            raise CheckpointError(
                f"cannot be read: {one_line(error)}", where=text, remedy="is it a GGUF file?"
            ) from error
        if os.path.isdir(folder):
            raise CheckpointError(
                f"the configuration is refused: {type(error).__name__}: {one_line(error)}", where=path,
                remedy="check the values, or install the transformers version that the model asks for",
            ) from error  # fmt: skip
        raise CheckpointError(
            "there is no such directory, and no model of that name in the local cache", where=text, remedy=_REMEDY
        ) from error


def _checked(source: Source) -> Source:
    """The source with notes, if its configuration is that of a causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    config = source.config
    kind = config.model_type
    architectures = list(getattr(config, "architectures", None) or [])
    if getattr(config, "is_encoder_decoder", False):
        raise RefusedError(
            f"{kind} is an encoder-decoder model", where=source.text, remedy="only causal language models are served"
        )
    head = NAMES.get(kind)
    plain = not architectures or architectures[0] == head or architectures[0].endswith(_HEADS)
    if head is None or not plain:
        what = architectures[0] if architectures else kind
        raise RefusedError(
            f"{what} is not a causal language model", where=source.text, remedy="only causal language models are served"
        )
    notes = []
    if (method := quantisation(config)) and not source.gguf:
        if "fp8" not in method:  # 8-bit floats keep a weight of the layer's own shape; the others pack several in one
            raise RefusedError(
                f"its weights are quantised ({method}): the layers have no plain weight to rewrite",
                where=source.text,
                remedy="dequantise the checkpoint first, or plan the model that it was made from",
            )
        dtype = str(getattr(config, "dtype", None) or torch.float32).removeprefix("torch.")
        notes.append(f"the checkpoint is quantised ({method}); figures are for plain {dtype} weights")
    if source.folder and os.path.isfile(os.path.join(source.folder, MARKER)):
        notes.append("the directory was converted by latentscan; figures are for the model before conversion")
    return Source(source.text, config, source.folder, source.gguf, source.family, source.overrides, tuple(notes))


def quantisation(config: Any) -> str:
    """The quantisation method that a configuration declares, or the empty string."""
    declared = getattr(config, "quantization_config", None)
    if not declared:
        return ""
    method = declared.get("quant_method") if isinstance(declared, dict) else getattr(declared, "quant_method", None)
    return str(getattr(method, "value", method) or "of an unknown kind")


def one_line(error: BaseException) -> str:
    """An error's text on one line, at most 300 characters."""
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    return (text or type(error).__name__)[:300].rstrip(".: ")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """transformers without its warnings and progress bars; what goes wrong is reported by us."""
    from transformers import logging as library

    level, bars = library.get_verbosity(), library.is_progress_bar_enabled()
    logger = logging.getLogger("transformers")
    library.set_verbosity_error()
    library.disable_progress_bar()
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        library.set_verbosity(level)
        if bars:
            library.enable_progress_bar()


__all__ = ["MARKER", "Source", "one_line", "quantisation", "quiet", "resolve"]
