"""The engine: one step plans, copies KV in, runs the model once over the whole batch, and chooses tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from tritone.engine.media import media_of, rotary_of
from tritone.engine.sampling import choose
from tritone.engine.scheduler import Plan, Scheduler
from tritone.engine.sequence import Sequence
from tritone.errors import TritoneError
from tritone.fatal import is_out_of_memory
from tritone.kernels import KV
from tritone.messages import TokenInfo
from tritone.models.decoder import Batch


class Model(Protocol):
    """What the engine needs of a decoder."""

    def forward(self, batch: Batch, kv: KV) -> torch.Tensor: ...
    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class Output:
    """A sequence's next token and the hidden state [hidden] it was chosen from, or the error that ends the sequence."""

    sequence: Sequence
    info: TokenInfo | None = None
    hidden: torch.Tensor | None = None
    error: TritoneError | None = None


class Engine:
    """``kv`` is [pages, layers, 2, kv_heads, page_size, head_dim], shared with the pool behind ``scheduler.pages``.

    ``handed`` [pages, page_size, hidden] keeps what a Talker is given of each token (``models/decoder/handed.py``) beside the
    token's KV, so that it is there as long as that, after a hit of the prefix cache too.
    """

    def __init__(self, model: Model, kv: KV, scheduler: Scheduler, handed: torch.Tensor | None = None) -> None:
        self.model = model
        self.kv = kv
        self.scheduler = scheduler
        self.handed = handed
        self.steps = 0
        """Steps computed so far."""

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Compute one step. Outputs name the sequences that got a token or failed; failed ones are already removed.

        An error of the model itself ends every sequence of the step, and only those; memory that cannot be had is raised.
        """
        plan = self.scheduler.schedule()
        outputs = self._check(plan) + self._import(plan)
        if not plan:
            return outputs
        self.steps += 1
        try:
            spans = self._spans(plan)
            batch, last = self._batch(spans)
            hidden = self._forward(batch, spans)
            ready = list(self.scheduler.computed(plan))
            if ready:
                rows = hidden[[last[sequence.session] for sequence in ready]]
                chosen = self._choose(rows, ready)
        except Exception as error:  # whatever the model raises, its requests must end with it
            if is_out_of_memory(error):
                raise
            failure = error if isinstance(error, TritoneError) else TritoneError(f"engine step failed: {error!r}")
            planned = plan.decodes + [sequence for sequence, _ in plan.chunks]
            return outputs + [self._fail(sequence, failure) for sequence in planned]
        for row, sequence in enumerate(ready):
            info = chosen[row]
            if isinstance(info, TritoneError):
                outputs.append(self._fail(sequence, info))
                continue
            self.scheduler.enter(sequence)
            sequence.append(info.token)
            outputs.append(Output(sequence, info, rows[row]))
        return outputs

    def _forward(self, batch: Batch, spans: list[tuple[Sequence, int]]) -> torch.Tensor:
        """Hidden states [T, hidden] of the new tokens, those of ``spans`` in order."""
        return self.model.forward(batch, self.kv)

    def _choose(self, hidden: torch.Tensor, ready: list[Sequence]) -> list[TokenInfo | TritoneError]:
        """The next token of each of ``ready`` from its last hidden state, a row of ``hidden`` [N, hidden]."""
        return choose(self.model.logits(hidden), ready)

    def _check(self, plan: Plan) -> list[Output]:
        """End the sequences whose pages are not what they took: before an import writes into them, and before any token of
        this step."""
        planned = [*plan.decodes, *(sequence for sequence, _ in plan.chunks), *plan.imports]
        faults = self.scheduler.tracker.check(list(dict.fromkeys(planned)))
        failed = [self._fail(sequence, error) for sequence, error in faults]
        self._leave_out(plan, failed)
        return failed

    def _import(self, plan: Plan) -> list[Output]:
        failed = []
        for sequence in plan.imports:
            assert sequence.import_kv is not None
            try:
                sequence.import_kv(sequence)
            except Exception as error:  # one hand-over's fault ends that request
                if is_out_of_memory(error):
                    raise
                known = error if isinstance(error, TritoneError) else TritoneError(f"import failed: {error!r}")
                failed.append(self._fail(sequence, known))
        self._leave_out(plan, failed)
        return failed

    @staticmethod
    def _leave_out(plan: Plan, failed: list[Output]) -> None:
        if failed:
            gone = {output.sequence for output in failed}
            plan.decodes = [s for s in plan.decodes if s not in gone]
            plan.chunks = [(s, n) for s, n in plan.chunks if s not in gone]
            plan.imports = [s for s in plan.imports if s not in gone]

    def handed_rows(self, sequence: Sequence, tokens: int) -> torch.Tensor:
        """What a Talker is given of the sequence's first ``tokens``, [tokens, hidden] in memory of its own."""
        assert self.handed is not None
        pages = sequence.pages[: -(-tokens // self.scheduler.page_size)]
        return self.handed[pages].flatten(0, 1)[:tokens]

    def _fail(self, sequence: Sequence, error: TritoneError) -> Output:
        self.scheduler.remove(sequence)
        return Output(sequence, error=error)

    @staticmethod
    def _spans(plan: Plan) -> list[tuple[Sequence, int]]:
        """Who computes how many tokens, in the batch's order: single-token sequences first."""
        spans = [(s, 1) for s in plan.decodes]
        # A chunk of one token (the budget's rest) is a single-token sequence to the model.
        return spans + [(s, n) for s, n in plan.chunks if n == 1] + [(s, n) for s, n in plan.chunks if n > 1]

    def _batch(self, spans: list[tuple[Sequence, int]]) -> tuple[Batch, dict[int, int]]:
        """The step as one flat batch, and each session's last row."""
        tokens: list[int] = []
        positions: list[int] = []
        starts = [0]
        contexts: list[int] = []
        last: dict[int, int] = {}
        computed = [(sequence, sequence.computed, count) for sequence, count in spans]
        table = np.zeros((len(spans), max(len(s.pages) for s, _ in spans)), np.int32)
        for row, (sequence, begin, count) in enumerate(computed):
            tokens += sequence.tokens[begin : begin + count]
            positions += range(begin, begin + count)
            starts.append(len(tokens))
            contexts.append(begin + count)
            last[sequence.session] = len(tokens) - 1
            table[row, : len(sequence.pages)] = sequence.pages
        batch = Batch(
            tokens=torch.tensor(tokens),
            positions=torch.tensor(positions, dtype=torch.int32),
            query_starts=starts,
            context_lens=torch.tensor(contexts, dtype=torch.int32),
            page_table=torch.from_numpy(table),
            rotary=rotary_of(computed),
            media=media_of(computed),
            handed=self.handed,
        )
        return batch, last
