"""What transformers generates from the same checkpoint in float32, and prompts to compare it on."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

WORDS = (
    "river mountain teacher garden window letter music winter summer market bridge doctor kitchen story "
    "forest engine paper ocean village candle bread silver horse painter island harvest lantern school thunder valley"
).split()
VERBS = "watched found carried painted followed opened crossed built visited described repaired".split()


def prose(seed: int, sentences: int) -> str:
    """Made-up English, the same on every machine."""
    draw = random.Random(seed)
    lines = [
        f"The {draw.choice(WORDS)} by the {draw.choice(WORDS)} {draw.choice(VERBS)} a {draw.choice(WORDS)} "
        f"and {draw.randint(2, 99)} of the {draw.choice(WORDS)}s."
        for _ in range(sentences)
    ]
    return " ".join(lines)


@dataclass(frozen=True)
class Generated:
    tokens: list[int]
    margin: float
    """The smallest lead of a chosen token's logit over the next one."""


class Reference:
    """Greedy answers, computed once each."""

    def __init__(self, checkpoint: str) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        self._known: dict[tuple[tuple[int, ...], int], Generated] = {}

    def generate(self, ids: list[int], count: int) -> Generated:
        key = (tuple(ids), count)
        if key not in self._known:
            out = self._model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                max_new_tokens=count,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
            best = torch.stack(out.logits)[:, 0].topk(2).values
            margin = float((best[:, 0] - best[:, 1]).min())
            self._known[key] = Generated(out.sequences[0, len(ids) :].tolist(), margin)
        return self._known[key]
