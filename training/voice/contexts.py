"""The Thinker's hidden states for a share of the answers, as if it had written them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.numpy import load_file
from transformers import AutoTokenizer

from training.voice.answers import clauses
from training.voice.data import Answer, Ints, save_arrays
from tritone.evaluation.runner import Runner
from tritone.models.decoder import load_decoder
from tritone.models.talker.context import TokenTrack

QUESTION = "Say something."
"""What every answer answers: the tokens before it matter little to the hidden states of its words."""

_POSITIONS = 1024


class Thinker:
    """Reads answers with the checkpoint in ``directory``."""

    def __init__(self, directory: Path) -> None:
        decoder = load_decoder(directory, dtype=torch.bfloat16, max_positions=_POSITIONS)
        self._runner = Runner(decoder, torch.bfloat16)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        messages = [{"role": "user", "content": QUESTION}]
        prompt = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        self._prompt = cast(list[int], prompt)

    def read(self, answer: str) -> tuple[list[str], torch.Tensor]:
        """The answer's tokens as text, and the hidden state that each was chosen from, float16 [T, hidden]."""
        encoded = self._tokenizer(answer, add_special_tokens=False, return_offsets_mapping=True)
        hidden = self._runner.hidden([*self._prompt, *encoded["input_ids"]], len(self._prompt))
        return [answer[start:stop] for start, stop in encoded["offset_mapping"]], hidden.to(torch.float16)


def unit_tokens(pieces: Sequence[str], texts: Sequence[str], answer: Answer) -> list[Ints]:
    """For each clause the index of each unit's token, -1 where none is known; ``texts`` are the clauses."""
    track = TokenTrack()
    for piece in pieces:
        track.feed(piece, 1)
    return [track.take(text, [clause.text])[0] for text, clause in zip(texts, answer, strict=True)]


def make_contexts(thinker: Thinker, texts: Sequence[str], answers: Sequence[Answer], path: Path) -> None:
    """Writes a shard's hidden states: those of all tokens, and for each unit the index of its own, or -1."""
    if path.is_file():
        return
    rows, units, first = [], [], 0
    for text, answer in zip(texts, answers, strict=True):
        if not answer:
            continue
        pieces, hidden = thinker.read(text)
        for own in unit_tokens(pieces, clauses(text), answer):
            units.append(np.where(own < 0, -1, own + first))
        rows.append(hidden.numpy())
        first += len(hidden)
    save_arrays({"hidden": np.concatenate(rows), "units": np.concatenate(units).astype(np.int32)}, path)


def with_contexts(answers: Sequence[Answer], path: Path) -> list[Answer]:
    """The answers of a shard with their hidden states; zeros where none is known."""
    arrays = load_file(path)
    hidden = np.concatenate([arrays["hidden"], np.zeros_like(arrays["hidden"][:1])])  # the last row is that of -1
    found, start = [], 0
    for answer in answers:
        made = []
        for clause in answer:
            stop = start + len(clause.reads)
            made.append(replace(clause, context=hidden[arrays["units"][start:stop]]))
            start = stop
        found.append(made)
    return found
