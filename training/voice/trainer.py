"""One step of training after the other, and checkpoints to go on from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from training.voice.batches import Batch
from training.voice.loss import RESIDUAL_WEIGHT, losses
from tritone.models.talker.config import TalkerConfig
from tritone.models.talker.model import TalkerModel


@dataclass(frozen=True)
class Plan:
    """How to train: ``rows`` of ``length`` places in a batch, ``steps`` in all.

    The learning rate rises to ``rate`` over ``warm_up`` steps, and falls over the last part ``decay`` of all. ``average`` is
    what the running average of the weights keeps in each step.
    """

    rows: int = 8
    length: int = 512
    steps: int = 4800
    rate: float = 2e-3
    warm_up: int = 100
    decay: float = 0.7
    average: float = 0.998
    seed: int = 20

    def rate_at(self, step: int) -> float:
        """The learning rate of a step, at least a fiftieth of ``rate`` once it has risen."""
        left = (self.steps - step) / (self.decay * self.steps)
        return self.rate * min(1.0, (step + 1) / self.warm_up) * max(0.02, min(1.0, left))


class Trainer:
    """Model, running average, optimisers and the number of steps taken: all that a checkpoint holds. What a step draws
    depends on its number alone."""

    def __init__(self, config: TalkerConfig, plan: Plan) -> None:
        torch.manual_seed(plan.seed)
        self.plan, self.step = plan, 0
        self.model = TalkerModel(config)
        self.averaged = TalkerModel(config).requires_grad_(False)
        matrices, others = _split(self.model)
        self._optimisers = (
            torch.optim.Muon(matrices, lr=plan.rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=plan.rate, betas=(0.9, 0.95), weight_decay=0.01),
        )

    def train(self, batch: Batch) -> tuple[float, float]:
        """One step; its two losses."""
        draw = torch.Generator().manual_seed(self.plan.seed * 1_000_003 + self.step)
        with torch.autocast("cpu", torch.bfloat16):
            first, rest = losses(self.model, batch, draw)
        (first + RESIDUAL_WEIGHT * rest).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimiser in self._optimisers:
            for group in optimiser.param_groups:
                group["lr"] = self.plan.rate_at(self.step)
            optimiser.step()  # type: ignore[no-untyped-call]
            optimiser.zero_grad()
        keep = min(self.plan.average, self.step / (self.step + 10))
        torch._foreach_lerp_(list(self.averaged.parameters()), list(self.model.parameters()), 1.0 - keep)
        self.step += 1
        return first.item(), rest.item()

    def save(self, path: Path) -> None:
        """Writes a checkpoint, whole or not at all."""
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "averaged": self.averaged.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self._optimisers],
        }
        temporary = path.with_suffix(".new")
        torch.save(state, temporary)
        temporary.replace(path)

    def load(self, path: Path) -> None:
        """Goes on from a checkpoint of the same config and plan."""
        state = torch.load(path)
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.averaged.load_state_dict(state["averaged"])
        for optimiser, values in zip(self._optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(values)


def _split(model: TalkerModel) -> tuple[list[Tensor], list[Tensor]]:
    """(matrices inside the layers, everything else)."""
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in model.named_parameters():
        inner = parameter.dim() == 2 and (".layers." in name or ".blocks." in name)
        (matrices if inner else others).append(parameter)
    return matrices, others
