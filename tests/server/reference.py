"""What transformers generates from the same checkpoint in float32, and prompts to compare it on."""

from __future__ import annotations

import random

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


class Reference:
    """The model as transformers runs it."""

    def __init__(self, checkpoint: str) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)

    @torch.inference_mode()
    def likeliest(self, ids: list[int], answer: list[int]) -> tuple[list[int], float]:
        """The likeliest token at each place of ``answer`` to the prompt ``ids``, given what comes before it there, and the
        smallest lead of one over the next. An answer that equals them is, by induction, the greedy one."""
        out = self._model(torch.tensor([ids + answer[:-1]]), logits_to_keep=len(answer))
        best = out.logits[0].topk(2)
        return best.indices[:, 0].tolist(), float((best.values[:, 0] - best.values[:, 1]).min())
