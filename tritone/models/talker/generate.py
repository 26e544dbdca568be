"""One answer after the other, spoken by the network in plain torch: what a batching engine must agree with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from tritone.models.codec.codec import Codes
from tritone.models.talker.config import END, READ
from tritone.models.talker.model import Cache, TalkerModel
from tritone.models.talker.text import ClauseText

Choose = Callable[[Tensor], int]


def likeliest(logits: Tensor) -> int:
    """The first of the largest logits [V]."""
    return int(logits.argmax())


@torch.inference_mode()
def speak(
    model: TalkerModel,
    clauses: Sequence[ClauseText],
    contexts: Sequence[Tensor] | None = None,
    speaker: int = 0,
    choose: Choose = likeliest,
) -> list[Codes]:
    """Codes int64 [F, 3] of each clause of one answer.

    contexts: for each clause the Thinker's hidden state for each unit, float [U, context_hidden]. An answer is cut short
    where it would be longer than the config's ``max_positions``.
    """
    known = [None] * len(clauses) if contexts is None else contexts
    units = [unit_rows(model, clause, context) for clause, context in zip(clauses, known, strict=True)]
    rows = [(number, row) for number, part in enumerate(units) for row in part][::-1]
    spoken: list[list[Codes]] = [[] for _ in clauses]
    current = 0
    cache: Cache = {}
    row = model.speaker_embedding.weight[speaker]
    for position in range(model.config.max_positions):
        hidden = model.model(row[None, None], position, cache)[0]
        token = choose(model.lm_head(hidden)[0, :END])
        if token == READ:
            if not rows:
                break
            current, row = rows.pop()
            continue
        codes = torch.tensor([[token] + [0] * (model.config.codebooks - 1)])
        for index in range(1, codes.shape[1]):
            codes[0, index] = choose(model.residual_logits(hidden, codes)[index - 1][0])
        spoken[current].append(codes[0].numpy())
        row = model.code_embeddings(codes)[0]
    return [np.array(frames, np.int64).reshape(-1, model.config.codebooks) for frames in spoken]


@torch.inference_mode()
def unit_rows(model: TalkerModel, clause: ClauseText, context: Tensor | None = None) -> Tensor:
    """The input of each unit of a clause, [U, hidden]; context as in :func:`speak`."""
    vectors = model.text_encoder(torch.from_numpy(clause.ids)[None])[0][torch.from_numpy(clause.picks)]
    return model.unit_inputs(vectors, context)
