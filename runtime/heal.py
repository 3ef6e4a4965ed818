"""Healing: a converted model learns from its original on a text (distillation).

The loss of a step is the KL divergence of the two models' next-token distributions, in nats per token, plus ``hidden``
times the relative squared distance of their hidden states, mean over layers and tokens. Everything that a step depends
on is in :class:`Healer`'s state, so that an interrupted run goes on as if nothing had happened.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from latentscan.ir.errors import PipelineError, RefusedError
from latentscan.runtime.door import session_of
from latentscan.runtime.factors import LowRankUpdate, Master

_BETAS, _EPS, _CLIP = (0.9, 0.95), 1e-8, 1.0
_EVALUATED = 8  # most held-out rows


@dataclass(frozen=True)
class Settings:
    """What decides a run. Two runs with equal settings on equal models and data take the same steps.

    Attributes:
        steps: optimiser steps in all. batch, seq: rows a step, and tokens a row.
        lr: peak learning rate of AdamW: rises over the first tenth (at most 20 steps), then falls as a cosine to 0.
        seed: of the order of rows and of LoRA's factors.
        train: ``attention`` (all parameters of the converted attentions) or ``all``.
        lora_rank: 0, or train factors of that rank beside frozen matrices.
        hidden: weight of the hidden states in the loss, beside the logits.
    """

    steps: int = 200
    batch: int = 4
    seq: int = 128
    lr: float = 1e-4  # docs/heal_and_export.md: 2e-4 is a little better in 200 steps and worse than nothing in 30
    seed: int = 0
    train: str = field(default="attention", metadata={"choices": ("attention", "all")})
    lora_rank: int = 0
    hidden: float = 0.0  # measured on SmolLM2: 1.0 ends equally well, for more memory

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("batch", 1), ("seq", 2), ("lora_rank", 0)):
            if getattr(self, name) < least:
                raise PipelineError(
                    f"{name}={getattr(self, name)} is below {least}", where="heal", remedy=f"give {name} >= {least}"
                )
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise PipelineError(f"lr={self.lr} is no learning rate", where="heal", remedy="give one above 0, e.g. 1e-4")
        if not (math.isfinite(self.hidden) and self.hidden >= 0):
            raise PipelineError(f"hidden={self.hidden} is no weight", where="heal", remedy="give 0 or more")
        choices = type(self).__dataclass_fields__["train"].metadata["choices"]
        if self.train not in choices:
            raise PipelineError(
                f"train={self.train!r} is not one of {', '.join(choices)}", where="heal", remedy="use one of these"
            )

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        rise = min(20, max(1, self.steps // 10))
        if step < rise:
            return self.lr * (step + 1) / rise
        return self.lr * 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, self.steps - rise)))


@dataclass(frozen=True)
class Rows:
    """A text as rows of tokens; the last twentieth (1 to 8 rows) is held out.

    Attributes:
        train: [N, seq]. held_out: [M, seq], never trained on.
        digest: of all tokens, so that a resumed run can tell that its data is the same.
    """

    train: Tensor
    held_out: Tensor
    digest: str

    @classmethod
    def of(cls, ids: Sequence[int], settings: Settings, vocabulary: int, where: str) -> Rows:
        """Raises PipelineError: too little text, or a token that the model does not know."""
        count = len(ids) // settings.seq
        held = min(_EVALUATED, max(1, count // 20))
        if count - held < 1:
            raise PipelineError(
                f"the text is {len(ids)} tokens, too few for two rows of {settings.seq}", where=where,
                remedy="give more text, or a smaller --seq",
            )  # fmt: skip
        if not 0 <= min(ids) <= max(ids) < vocabulary:
            raise PipelineError(
                f"the text holds token {max(ids)}, the vocabulary has {vocabulary}", where=where,
                remedy="use the model's own tokenizer",
            )  # fmt: skip
        rows = torch.tensor(ids[: count * settings.seq], dtype=torch.long).reshape(count, settings.seq)
        return cls(rows[:-held], rows[-held:], hashlib.sha256(rows.numpy().tobytes()).hexdigest())

    def batch(self, step: int, settings: Settings) -> Tensor:
        """Rows [batch, seq] of a step: passes over all rows one after the other, each in an order of its own."""
        count, picked = len(self.train), []
        orders: dict[int, Tensor] = {}
        for at in range(step * settings.batch, (step + 1) * settings.batch):
            turn, place = divmod(at, count)
            if turn not in orders:
                mixed = hashlib.sha256(f"{settings.seed} {turn}".encode()).digest()[:4]  # a generator takes 32 bits
                seeded = torch.Generator().manual_seed(int.from_bytes(mixed, "big"))
                orders[turn] = torch.randperm(count, generator=seeded)
            picked.append(int(orders[turn][place]))
        return self.train[picked]


def trainable(model: nn.Module, train: str) -> dict[str, nn.Parameter]:
    """The parameters that healing changes, by name. Everything else is frozen.

    Raises:
        RefusedError: the model is not wrapped, or nothing was lost when it was converted.
    """
    session = session_of(model)
    if session is None:
        raise RefusedError(
            "the model is not converted", where=type(model).__name__, remedy="wrap or convert it, with a rank"
        )
    lossy = sorted({r.module for r in session.plan.recipes if r.inverse is None})
    if not lossy:
        raise RefusedError(
            f"the pipeline {session.plan.pipeline!r} is exact: nothing was lost, so there is nothing to heal",
            where=type(model).__name__,
            remedy="use the model as it is, or convert it with mha-to-mla{rank=...}",
        )
    found = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and (train == "all" or any(name.startswith(m + ".") for m in lossy))
    }
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for parameter in found.values():
        parameter.requires_grad_(True)
    return found


def check_teacher(student: nn.Module, teacher: nn.Module, where: str) -> None:
    """Raise RefusedError unless the original fits the converted model."""
    mine, theirs = (
        {
            "class": type(m).__name__,
            "vocabulary": m.get_input_embeddings().weight.shape[0],  # type: ignore[operator, union-attr]
            "layers": getattr(m.config, "num_hidden_layers", None),
            "hidden size": getattr(m.config, "hidden_size", None),
        }
        for m in (student, teacher)
    )
    for what, value in mine.items():
        if theirs[what] != value:
            raise RefusedError(
                f"its {what} is {theirs[what]}, the converted model's {value}", where=where,
                remedy="give the model that was converted",
            )  # fmt: skip


class Healer:
    """A converted model, its original, the data and the optimiser: one run.

    Args:
        student: a wrapped model; its parameters are written in place. teacher: its original.
    """

    def __init__(self, student: nn.Module, teacher: nn.Module, rows: Rows, settings: Settings) -> None:
        check_teacher(student, teacher, "the original")
        self.student, self.teacher, self.rows, self.settings = student, teacher.eval(), rows, settings
        for parameter in teacher.parameters():
            parameter.requires_grad_(False)
        self.device = next(student.parameters()).device
        self.step_number = 0
        self.losses: list[dict[str, float]] = []  # a step each
        torch.manual_seed(settings.seed)
        self.updates: dict[str, Master | LowRankUpdate] = {}
        for name, parameter in trainable(student, settings.train).items():
            if not settings.lora_rank:
                self.updates[name] = Master(parameter)
            elif parameter.dim() == 2 and settings.lora_rank < min(parameter.shape):
                self.updates[name] = LowRankUpdate(parameter, settings.lora_rank)
            else:
                parameter.requires_grad_(False)
        if not self.updates:
            raise RefusedError(
                f"no matrix is larger than lora_rank={settings.lora_rank}", where="heal", remedy="give a smaller rank"
            )
        self.optimiser = torch.optim.AdamW(
            list(self.variables().values()), lr=settings.lr, betas=_BETAS, eps=_EPS, weight_decay=0.0
        )

    def variables(self) -> dict[str, Tensor]:
        """What the optimiser moves, fp32."""
        return {
            f"{name}.{part}" if part else name: variable
            for name, update in self.updates.items()
            for part, variable in update.variables.items()
        }

    def loss(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """KL divergence (nats per token) and hidden-state distance of one batch [B, L]."""
        wants = self.settings.hidden > 0
        words = {"input_ids": ids, "use_cache": False, "output_hidden_states": wants}
        with torch.no_grad():
            theirs = self.teacher(**words)
        mine = self.student(**words)
        divergence = F.kl_div(
            F.log_softmax(mine.logits.float(), -1).flatten(0, 1),
            F.log_softmax(theirs.logits.float(), -1).flatten(0, 1),
            log_target=True,
            reduction="batchmean",
        )
        if not wants:
            return divergence, divergence.new_zeros(())
        pairs = list(zip(mine.hidden_states, theirs.hidden_states, strict=True))[1:]  # the first is the embedding
        return divergence, torch.stack([relative_distance(a, b) for a, b in pairs]).mean()

    def step(self) -> dict[str, float]:
        """Take one step; returns its loss, the parts of it, the gradient's norm and the learning rate.

        Raises:
            RefusedError: the loss is not finite. The model is as it was before the step.
        """
        rate = self.settings.rate(self.step_number)
        self.student.eval()  # no dropout: the original draws none, and a graph with dropout keeps its plain attention
        ids = self.rows.batch(self.step_number, self.settings).to(self.device)
        divergence, hidden = self.loss(ids)
        total = divergence + self.settings.hidden * hidden
        if not torch.isfinite(total):
            raise RefusedError(
                f"the loss of step {self.step_number + 1} is {float(total.detach())}", where="heal",
                remedy="give a smaller --lr",
            )  # fmt: skip
        total.backward()
        for update in self.updates.values():
            update.take_gradient()
        norm = torch.nn.utils.clip_grad_norm_(list(self.variables().values()), _CLIP)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.step()
        self.optimiser.zero_grad()
        for update in self.updates.values():
            update.write()
        self.step_number += 1
        told = {
            "loss": float(total.detach()), "kl": float(divergence.detach()), "hidden": float(hidden.detach()),
            "norm": float(norm), "lr": rate,
        }  # fmt: skip
        self.losses.append(told)
        return told

    def nll(self, model: nn.Module) -> float:
        """Mean negative log likelihood of the held-out rows, nats per token."""
        training, total = model.training, 0.0
        model.eval()
        with torch.no_grad():
            for row in self.rows.held_out:
                ids = row[None].to(self.device)
                total += float(model(input_ids=ids, labels=ids, use_cache=False).loss)
        model.train(training)
        return total / len(self.rows.held_out)

    # -- state --------------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Everything that the next steps depend on beside :meth:`numbers`, for safetensors."""
        found = {"rng.cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            found["rng.cuda"] = torch.cuda.get_rng_state(self.device)
        for name, variable in self.variables().items():
            found[f"value.{name}"] = variable.detach()
            for key, value in self.optimiser.state[variable].items():
                found[f"{key}.{name}"] = value
        for name, update in self.updates.items():
            for part, tensor in update.constants.items():
                found[f"{part}.{name}"] = tensor
        return {name: t.detach().to("cpu").contiguous() for name, t in found.items()}

    def numbers(self) -> dict[str, Any]:
        return {"settings": self.settings.to_json(), "step": self.step_number, "losses": self.losses,
                "data": self.rows.digest}  # fmt: skip

    def resume(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """Go on where another Healer's :meth:`tensors` and :meth:`numbers` were taken."""
        self.step_number, self.losses = int(numbers["step"]), list(numbers["losses"])
        with torch.no_grad():
            for name, update in self.updates.items():
                for part, tensor in update.constants.items():
                    tensor.copy_(tensors[f"{part}.{name}"])
            for name, variable in self.variables().items():
                variable.copy_(tensors[f"value.{name}"])
                state = {
                    key: tensors[f"{key}.{name}"].clone()
                    for key in ("step", "exp_avg", "exp_avg_sq")
                    if f"{key}.{name}" in tensors
                }
                self.optimiser.state[variable] = {
                    key: value if key == "step" else value.to(self.device) for key, value in state.items()
                }
        for update in self.updates.values():
            update.write()
        torch.set_rng_state(tensors["rng.cpu"])
        if "rng.cuda" in tensors and self.device.type == "cuda":
            torch.cuda.set_rng_state(tensors["rng.cuda"], self.device)

    def run(self) -> Iterator[dict[str, float]]:
        """The steps that are left."""
        while self.step_number < self.settings.steps:
            yield self.step()


def relative_distance(mine: Tensor, theirs: Tensor) -> Tensor:
    """Mean over tokens of |a - b|^2 / |b|^2, of hidden states [B, L, D]. (Per token: a few have huge features.)"""
    a, b = mine.float(), theirs.float()
    return ((a - b).square().sum(-1) / b.square().sum(-1).clamp_min(1e-12)).mean()


__all__ = ["Healer", "Rows", "Settings", "check_teacher", "relative_distance", "trainable"]
