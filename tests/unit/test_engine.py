"""The engine with a model made of a rule: pages, preemption, imports and neighbours change no answer."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from tritone.engine.engine import Engine, Output
from tritone.engine.scheduler import Scheduler
from tritone.engine.sequence import Sequence
from tritone.errors import TritoneError
from tritone.messages import TokenInfo
from tritone.models.decoder import Batch
from tritone.options import Sampling
from tritone.pools.free_list import FreeList

VOCABULARY = 61
PAGE = 4
GREEDY = Sampling(temperature=0.0)
SAMPLED = Sampling(temperature=1.5, top_k=20, repetition_penalty=1.1, presence_penalty=0.4, seed=11)


def logits_of(context: list[int]) -> Any:
    """The rule: 61 values that depend on every token of the context and on their order."""
    value = 1
    for token in context:
        value = (value * 131 + token + 1) % 1_000_003
    return np.random.default_rng(value).normal(size=VOCABULARY).astype(np.float32)


@dataclass
class RuleModel:
    """Writes token ids into the KV pages and reads contexts back from there, like attention would."""

    steps: list[list[int]] = field(default_factory=list)
    fail: Callable[[Batch], None] = lambda batch: None

    def forward(self, batch: Batch, kv: torch.Tensor) -> torch.Tensor:
        self.fail(batch)
        starts = batch.query_starts
        counts = [stop - start for start, stop in itertools.pairwise(starts)]
        self.steps.append(counts)
        assert batch.tokens.dtype == torch.int64 and batch.positions.dtype == torch.int32
        assert batch.context_lens.dtype == torch.int32 and batch.page_table.dtype == torch.int32
        assert counts == [1] * batch.num_decodes + [count for count in counts if count > 1]
        flat = kv[:, 0, 0, 0, :, 0]
        slots = batch.slots(PAGE)
        flat[slots // PAGE, slots % PAGE] = batch.tokens.float()
        hidden = []
        for row, count in enumerate(counts):
            length = int(batch.context_lens[row])
            for position in range(length - count, length):
                assert int(batch.positions[starts[row] + position - (length - count)]) == position
                pages = batch.page_table[row, [place // PAGE for place in range(position + 1)]].long()
                offsets = torch.tensor([place % PAGE for place in range(position + 1)])
                hidden.append(torch.tensor(logits_of(flat[pages, offsets].long().tolist())))
        return torch.stack(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class Bench:
    def __init__(self, pages: int, max_sequences: int = 8, max_batch_tokens: int = 16) -> None:
        self.pages = FreeList(pages)
        self.kv = torch.full((pages, 1, 1, 1, PAGE, 1), -1.0)
        self.model = RuleModel()
        self.engine = Engine(
            self.model, self.kv, Scheduler(self.pages, PAGE, max_sequences, max_batch_tokens)
        )
        self.errors: dict[int, TritoneError] = {}
        self.answers: dict[int, list[int]] = {}

    def add(
        self, session: int, prompt: list[int], count: int, sampling: Sampling = GREEDY, **more: Any
    ) -> Sequence:
        sequence = Sequence(session, list(prompt), len(prompt), sampling, count, **more)
        self.engine.scheduler.add(sequence)
        return sequence

    def add_imported(
        self, session: int, prompt: list[int], count: int, first: int, sampling: Sampling = GREEDY
    ) -> Sequence:
        def copy(sequence: Sequence) -> None:
            for position, token in enumerate(prompt):
                self.kv[sequence.pages[position // PAGE], 0, 0, 0, position % PAGE, 0] = token

        sequence = self.add(session, prompt, count, sampling, imported=len(prompt), import_kv=copy)
        sequence.append(first)
        return sequence

    def step(self) -> list[Output]:
        outputs = self.engine.step()
        for output in outputs:
            sequence = output.sequence
            if output.error is not None:
                assert output.info is None and output.hidden is None
                assert sequence not in self.engine.scheduler.running
                self.errors[sequence.session] = output.error
                continue
            assert output.info is not None and output.hidden is not None
            assert output.info.token == sequence.tokens[-1]
            # The hidden state is the one the token was chosen from.
            np.testing.assert_array_equal(output.hidden.numpy(), logits_of(sequence.tokens[:-1]))
            if sequence.answer_length == sequence.max_tokens:
                self.answers[sequence.session] = sequence.tokens[sequence.prompt_length :]
                self.engine.scheduler.remove(sequence)
        return outputs

    def run(self) -> None:
        for _ in range(3000):
            if not len(self.engine.scheduler):
                assert self.pages.available == self.pages.total
                return
            self.step()
        raise AssertionError("the sequences did not end")


def greedy(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_of(tokens).argmax()))
    return tokens[len(prompt) :]


def alone(prompt: list[int], count: int, sampling: Sampling) -> list[int]:
    bench = Bench(pages=100)
    bench.add(1, prompt, count, sampling)
    bench.run()
    return bench.answers[1]


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 16, 17, 40])
def test_greedy_is_the_rule(length: int) -> None:
    prompt = [(7 * place) % VOCABULARY for place in range(length)]
    assert alone(prompt, 12, GREEDY) == greedy(prompt, 12)


def test_nothing_to_do() -> None:
    bench = Bench(pages=4)
    assert bench.step() == []
    assert bench.model.steps == []


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_answers_do_not_depend_on_pool_size_batch_or_import(seed: int, sampling: Sampling) -> None:
    chance = random.Random(seed)
    jobs = {
        session: ([chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 30))], chance.randint(2, 10))
        for session in range(8)
    }
    expected = {session: alone(prompt, count, sampling) for session, (prompt, count) in jobs.items()}
    for pages in (10, 14, 100):
        bench = Bench(pages, max_sequences=chance.choice([2, 8]), max_batch_tokens=chance.choice([8, 16, 64]))
        sequences = []
        for session, (prompt, count) in jobs.items():
            if chance.random() < 0.5:
                sequences.append(bench.add_imported(session, prompt, count, expected[session][0], sampling))
            else:
                sequences.append(bench.add(session, prompt, count, sampling))
        bench.run()
        assert bench.errors == {}
        assert bench.answers == expected


def test_preemption_changes_no_answer() -> None:
    jobs = {session: [session + 1] * 6 for session in range(4)}
    bench = Bench(pages=9)
    sequences = [
        bench.add_imported(session, prompt, 14, alone(prompt, 1, SAMPLED)[0], SAMPLED)
        if session % 2
        else bench.add(session, prompt, 14, SAMPLED)
        for session, prompt in jobs.items()
    ]
    bench.run()
    assert sum(sequence.preemptions for sequence in sequences) > 0
    assert any(sequence.preemptions for sequence in sequences[1::2])
    assert bench.answers == {session: alone(prompt, 14, SAMPLED) for session, prompt in jobs.items()}


def test_imported_tokens_are_not_computed_again() -> None:
    bench = Bench(pages=20)
    prompt = list(range(13))
    bench.add_imported(1, prompt, 5, greedy(prompt, 1)[0])
    bench.run()
    assert bench.model.steps == [[1]] * 4
    assert bench.answers == {1: greedy(prompt, 5)}


def test_one_batch_for_decodes_and_chunks() -> None:
    bench = Bench(pages=40)
    bench.add(1, [1, 2], 9)
    bench.step()
    bench.add(2, [3] * 20, 2)
    bench.step()
    bench.step()
    assert bench.model.steps == [[2], [1, 15], [1, 5]]


def test_a_chunk_of_one_token_goes_in_front() -> None:
    bench = Bench(pages=40, max_batch_tokens=16)
    bench.add(1, [1] * 15, 3)
    bench.add(2, [2] * 15, 3)
    bench.run()
    assert bench.model.steps[0] == [1, 15]  # the budget's last token for the second prompt
    assert bench.answers == {1: greedy([1] * 15, 3), 2: greedy([2] * 15, 3)}


def test_an_import_that_fails_ends_its_own_sequence_only() -> None:
    def stale(sequence: Sequence) -> None:
        raise TritoneError("tag 5 found, 4 expected", "INTERNAL")

    bench = Bench(pages=40)
    bench.add(1, [1, 2, 3], 4)
    bench.add(2, [4, 5, 6, 9], 4, imported=3, import_kv=stale)
    bench.add_imported(3, [7, 8], 4, greedy([7, 8], 1)[0])
    bench.run()
    assert {session: error.message for session, error in bench.errors.items()} == {
        2: "tag 5 found, 4 expected"
    }
    assert bench.answers == {1: greedy([1, 2, 3], 4), 3: greedy([7, 8], 4)}


def test_an_only_sequence_whose_import_fails() -> None:
    def stale(sequence: Sequence) -> None:
        raise TritoneError("gone")

    bench = Bench(pages=4)
    bench.add(1, [1, 2], 4, imported=1, import_kv=stale)
    bench.run()
    assert set(bench.errors) == {1}
    assert bench.model.steps == []


def test_whatever_an_import_raises_ends_its_own_sequence_only() -> None:
    def broken(sequence: Sequence) -> None:
        raise ValueError("could not broadcast")

    bench = Bench(pages=40)
    bench.add(1, [1, 2, 3], 4)
    bench.add(2, [4, 5, 6, 9], 4, imported=3, import_kv=broken)
    bench.add_imported(3, [7, 8], 4, greedy([7, 8], 1)[0])
    bench.run()
    assert set(bench.errors) == {2}
    assert "could not broadcast" in bench.errors[2].message
    assert bench.answers == {1: greedy([1, 2, 3], 4), 3: greedy([7, 8], 4)}


def test_an_error_of_the_model_ends_the_sequences_of_that_step_and_only_those() -> None:
    bench = Bench(pages=8, max_sequences=2)
    for session in (1, 2, 3):
        bench.add(session, [session] * 3, 3)

    def fail(batch: Batch) -> None:
        raise RuntimeError("out of memory")

    bench.step()
    bench.model.fail = fail
    bench.step()
    bench.model.fail = lambda batch: None
    assert set(bench.errors) == {1, 2}
    assert all(
        error.code == "INTERNAL" and "out of memory" in error.message for error in bench.errors.values()
    )
    bench.run()
    assert bench.answers == {3: greedy([3] * 3, 3)}


def test_the_models_own_errors_keep_their_code() -> None:
    bench = Bench(pages=8)
    bench.add(1, [1], 3)

    def fail(batch: Batch) -> None:
        raise TritoneError("no memory", "RESOURCE_EXHAUSTED")

    bench.model.fail = fail
    bench.run()
    assert str(bench.errors[1]) == "RESOURCE_EXHAUSTED: no memory"


def test_a_row_that_is_not_finite_ends_one_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(pages=20)
    bench.add(1, [1], 4)
    bench.add(2, [2], 4)
    bench.step()

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        broken = hidden.clone()
        broken[1] = float("nan")
        return broken

    monkeypatch.setattr(bench.model, "logits", logits)
    bench.step()
    monkeypatch.undo()
    bench.run()
    assert set(bench.errors) == {2}
    assert bench.answers == {1: greedy([1], 4)}


def test_a_half_prefilled_prompt_has_no_output_yet() -> None:
    bench = Bench(pages=20, max_batch_tokens=16)
    bench.add(1, [3] * 40, 2)
    assert [len(bench.step()) for _ in range(4)] == [0, 0, 1, 1]
    assert bench.answers == {1: greedy([3] * 40, 2)}


def test_logprobs_reach_the_output() -> None:
    bench = Bench(pages=4)
    bench.add(1, [3], 1, logprobs=2)
    (output,) = bench.step()
    assert isinstance(output.info, TokenInfo) and output.info.logprob is not None
    assert output.info.logprob <= 0
    assert len(output.info.top) == 2
    assert output.info.top[0][0] == output.info.token


@pytest.mark.parametrize("part", ["model", "import"])
def test_memory_that_cannot_be_had_is_raised(part: str) -> None:
    """What drives the engine ends the process with it; an answer made with what is left would not be trusted."""
    bench = Bench(8)

    def huge(*_: object) -> None:
        torch.empty(1 << 60, dtype=torch.uint8)

    if part == "model":
        bench.add(1, [1, 2, 3], 4)
        bench.model.fail = huge
    else:
        bench.add(1, [1, 2, 3], 4, imported=2, import_kv=huge)
    with pytest.raises(RuntimeError, match="allocate memory"):
        bench.engine.step()
