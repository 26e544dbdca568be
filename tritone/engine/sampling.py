"""Choosing the next token. A row depends on its own logits, options and seed alone, never on the rest of the batch.

Randomness is counter-based: token ``i`` of an answer with seed ``s`` uses Philox with key ``s`` and counter ``i``, so prefill
and decode agree without passing generator state, and a preempted sequence goes on as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import torch

from tritone.engine.sequence import Sequence
from tritone.errors import TritoneError
from tritone.messages import TokenInfo
from tritone.options import Sampling


def choose(logits: torch.Tensor, sequences: Rows[Sequence]) -> list[TokenInfo | TritoneError]:
    """One token for each row of ``logits`` (float32 [N, vocabulary]); a row that is not finite is that row's error.

    ``logprob`` values are of the model's own distribution, before penalties and temperature.
    """
    best_values, best_ids = logits.max(dim=-1)
    finite = torch.isfinite(best_values).tolist()
    greedy = best_ids.tolist()
    chosen: list[TokenInfo | TritoneError] = []
    for row, sequence in enumerate(sequences):
        if not finite[row]:
            chosen.append(TritoneError("the model's logits are not finite"))
            continue
        sampling = sequence.sampling
        if _plain_greedy(sampling):
            token = int(greedy[row])
        else:
            token = draw(_penalised(logits[row], sequence), sampling, sequence.answer_length)
        chosen.append(_with_logprobs(token, logits[row], sequence.logprobs))
    return chosen


def _plain_greedy(sampling: Sampling) -> bool:
    return sampling.temperature == 0 and (
        sampling.repetition_penalty == 1 and sampling.presence_penalty == 0 and sampling.frequency_penalty == 0
    )


def _penalised(row: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    sampling = sequence.sampling
    if sampling.repetition_penalty != 1 and sequence.seen:
        seen = torch.tensor(sorted(sequence.seen))
        values = row[seen]
        scaled = torch.where(values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty)
        row = row.index_copy(0, seen, scaled)
    if sequence.counts and (sampling.presence_penalty or sampling.frequency_penalty):
        ids = torch.tensor(list(sequence.counts))
        counts = torch.tensor(list(sequence.counts.values()), dtype=row.dtype)
        row = row.index_add(0, ids, -(sampling.presence_penalty + sampling.frequency_penalty * counts))
    return row


def draw(row: torch.Tensor, sampling: Sampling, counter: int) -> int:
    """An id from the logits ``row`` [ids] by temperature, top_k, top_p and min_p; ``counter`` is below 2 ** 256."""
    if sampling.temperature == 0:
        return int(row.argmax())
    # Largest first; ties by id, so that the order is the same on every machine.
    values, ids = torch.sort(row, descending=True, stable=True)
    if sampling.top_k:
        values, ids = values[: sampling.top_k], ids[: sampling.top_k]
    probabilities = torch.softmax((values.double() - values[0].double()) / sampling.temperature, dim=0)
    keep = len(probabilities)
    if sampling.top_p < 1:
        # The smallest set whose sum reaches top_p: everything before the sum got there, and the token that does.
        before = probabilities.cumsum(0) - probabilities
        keep = int((before < sampling.top_p).sum())
    if sampling.min_p > 0:
        keep = min(keep, int((probabilities >= sampling.min_p * probabilities[0]).sum()))
    cumulative = probabilities[: max(keep, 1)].cumsum(0)
    uniform = np.random.Generator(np.random.Philox(key=sampling.seed, counter=counter)).random()
    index = int(torch.searchsorted(cumulative, uniform * float(cumulative[-1]), right=True))
    return int(ids[min(index, len(cumulative) - 1)])


def _with_logprobs(token: int, row: torch.Tensor, count: int | None) -> TokenInfo:
    if count is None:
        return TokenInfo(token)
    logprobs = torch.log_softmax(row.double(), dim=0)
    top: list[tuple[int, float]] = []
    if count:
        values, ids = logprobs.topk(count)
        top = list(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenInfo(token, float(logprobs[token]), tuple(top))
