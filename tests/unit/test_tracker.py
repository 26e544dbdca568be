"""The tracker: whatever happens to a sequence's pages is found before the next step, and ends that sequence alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_engine import GREEDY, PAGE, RuleModel, greedy
from tritone.engine.engine import Engine, Output
from tritone.engine.prefix_cache import PrefixCache
from tritone.engine.scheduler import Scheduler
from tritone.engine.sequence import Sequence
from tritone.errors import TritoneError
from tritone.integrity import IntegrityError, Ledger, NoTracker, Tracker
from tritone.pools import BlockPool, PoolView
from tritone.pools.pool import torch_view
from tritone.stages.saved import saver

PROMPTS = {number: [number * 7 + place for place in range(6)] for number in range(4)}
ANSWER = 14


class Bench:
    """The engine with the model that reads whole contexts out of its pages, over a real pool."""

    def __init__(self, directory: Path, pages: int = 40, *, log_only: bool = False, cache: bool = False) -> None:
        self.pool = BlockPool(directory, "pages", pages, (1, 1, 1, PAGE, 1), "float32", 4)
        self.ledger = Ledger(directory, "pages", owner=True)
        self.tracker = Tracker(self.pool, self.ledger, log_only=log_only)
        self.cache = PrefixCache(self.pool, PAGE) if cache else None
        self.scheduler = Scheduler(self.pool, PAGE, 8, 64, cache=self.cache, tracker=self.tracker)
        self.model = RuleModel()
        self.engine = Engine(self.model, torch_view(self.pool.data, "float32", (1, 1, 1, PAGE, 1)), self.scheduler)
        self.errors: dict[int, TritoneError] = {}
        self.answers: dict[int, list[int]] = {}
        self.alive: dict[int, Sequence] = {}

    def add(self, session: int, prompt: list[int], **more: Any) -> Sequence:
        sequence = Sequence(session, list(prompt), len(prompt), GREEDY, ANSWER, **more)
        self.scheduler.add(sequence)
        self.alive[session] = sequence
        return sequence

    def step(self) -> list[Output]:
        outputs = self.engine.step()
        for output in outputs:
            session = output.sequence.session
            if output.error is not None:
                assert output.info is None
                self.errors[session] = output.error
                self.answers[session] = output.sequence.tokens[output.sequence.prompt_length :]
            elif output.sequence.answer_length == ANSWER:
                self.answers[session] = output.sequence.tokens[output.sequence.prompt_length :]
                self.scheduler.remove(output.sequence)
        return outputs

    def run(self) -> None:
        for _ in range(500):
            if not len(self.scheduler):
                return
            self.step()
        raise AssertionError("the sequences did not end")


def stale(bench: Bench, sequence: Sequence) -> None:
    bench.pool.tags[sequence.pages[0]] += 1


def given_to_another(bench: Bench, sequence: Sequence) -> None:
    bench.pool.free([sequence.pages[1]])
    blocks = bench.pool.allocate(bench.pool.available)
    for block in blocks:
        bench.pool.block(block)[:] = 7
    bench.pool.free(blocks)


def freed(bench: Bench, sequence: Sequence) -> None:
    bench.pool.free([sequence.pages[-1]])


def foreign(bench: Bench, sequence: Sequence) -> None:
    sequence.pages[0] = bench.alive[0].pages[0]


def exchanged(bench: Bench, sequence: Sequence) -> None:
    sequence.pages[0], sequence.pages[1] = sequence.pages[1], sequence.pages[0]


def lost(bench: Bench, sequence: Sequence) -> None:
    sequence.pages.pop(0)


def outside(bench: Bench, sequence: Sequence) -> None:
    sequence.pages[0] = bench.pool.total


def negative(bench: Bench, sequence: Sequence) -> None:
    sequence.pages[-1] = -1


FAULTS = [
    (stale, "stale_tag"),
    (given_to_another, "stale_tag"),
    (freed, "stale_tag"),
    (foreign, "page_table"),
    (exchanged, "page_table"),
    (lost, "page_table"),
    (outside, "out_of_range"),
    (negative, "out_of_range"),
]


@pytest.mark.parametrize("after", [1, 5])
@pytest.mark.parametrize(("fault", "kind"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_damaged_sequence_ends_alone_and_before_its_next_token(
    tmp_path: Path, fault: Callable[[Bench, Sequence], None], kind: str, after: int
) -> None:
    bench = Bench(tmp_path)
    for session, prompt in PROMPTS.items():
        bench.add(session, prompt)
    for _ in range(after):
        bench.step()
    victim = bench.alive[2]
    fault(bench, victim)
    bench.run()
    error = bench.errors.pop(2)
    assert not bench.errors
    assert isinstance(error, IntegrityError) and error.kind == kind
    assert error.message.startswith(f"integrity: {kind}: ")
    assert bench.answers == {
        session: greedy(prompt, after if session == 2 else ANSWER) for session, prompt in PROMPTS.items()
    }
    assert bench.pool.gauges() == {"free": 40, "used": 0, "cached": 0, "leased": 0}
    assert sorted(bench.pool.allocate(40)) == list(range(40))
    assert bench.ledger.read().mismatches[kind] == 1 == sum(bench.ledger.read().mismatches.values())


def test_nothing_is_found_where_nothing_is_wrong(tmp_path: Path) -> None:
    """Prompts that share pages, catch up with each other, are preempted and put aside: no false alarm."""
    chance = random.Random(5)
    bench = Bench(tmp_path, pages=16, cache=True)
    save = saver(bench.pool, PAGE)
    stem = [3] * 9
    prompts = {}
    for session in range(30):
        prompts[session] = stem[: chance.randint(0, 9)] + [chance.randrange(60) for _ in range(chance.randint(1, 9))]
        bench.add(session, prompts[session], save_kv=save if session % 2 else None)
        for _ in range(chance.randint(0, 3)):
            bench.step()
    bench.run()
    assert bench.errors == {}
    assert bench.answers == {session: greedy(prompt, ANSWER) for session, prompt in prompts.items()}
    assert sum(sequence.preemptions for sequence in bench.alive.values()) > 0
    assert sum(sequence.cached for sequence in bench.alive.values()) > 0
    reading = bench.ledger.read()
    assert reading.checks >= bench.engine.steps > 0
    assert sum(reading.mismatches.values()) == 0


def test_pages_checked_are_those_of_the_batch(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for session, prompt in PROMPTS.items():
        bench.add(session, prompt)
    bench.step()
    assert bench.ledger.read().pages_checked == sum(len(s.pages) for s in bench.alive.values()) == 4 * 2


def test_a_page_that_two_sequences_took_ends_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path)
    for session in (0, 1):
        bench.add(session, PROMPTS[session])
    bench.step()
    page = bench.alive[1].pages[0]
    real = bench.pool.allocate
    monkeypatch.setattr(bench.pool, "allocate", lambda count: [page, *real(count - 1)])
    bench.add(2, PROMPTS[2])
    bench.step()
    monkeypatch.undo()
    bench.run()
    assert {session: getattr(error, "kind", "") for session, error in bench.errors.items()} == {
        1: "double_hold", 2: "double_hold"
    }
    assert bench.answers[0] == greedy(PROMPTS[0], ANSWER)


def test_a_cached_page_whose_tag_changed_is_found_by_its_next_reader_and_then_forgotten(tmp_path: Path) -> None:
    bench = Bench(tmp_path, cache=True)
    prompt = list(range(10))
    bench.add(0, prompt)
    bench.run()
    bench.pool.tags[bench.cache.match(Sequence(9, prompt, 10, GREEDY, 1))[1]] += 5  # type: ignore[union-attr]
    bench.add(1, prompt)
    bench.run()
    assert bench.errors[1].kind == "stale_tag"  # type: ignore[attr-defined]
    bench.add(2, prompt)
    bench.run()
    assert 2 not in bench.errors and bench.answers[2] == greedy(prompt, ANSWER)


@pytest.mark.parametrize("held", [True, False])
def test_what_a_reader_condemns_is_used_no_more(tmp_path: Path, held: bool) -> None:
    bench = Bench(tmp_path, cache=True)
    first, second = list(range(10)), list(range(30, 40))
    bench.add(0, first)
    bench.add(1, second)
    bench.step()
    page = bench.alive[0].pages[0]
    if not held:
        bench.run()
    PoolView(tmp_path, "pages").condemn(page, int(bench.pool.tags[page]))
    bench.add(2, [*first, 50])
    bench.run()
    assert set(bench.errors) == ({0} if held else set())
    assert bench.alive[2].cached == 0
    assert bench.answers[2] == greedy([*first, 50], ANSWER)
    assert bench.answers[1] == greedy(second, ANSWER)
    assert bench.ledger.read().mismatches["content"] == 1
    # The page serves again under its next tag.
    assert bench.pool.gauges()["used"] == 0
    bench.cache.clear()  # type: ignore[union-attr]
    assert bench.pool.gauges()["free"] == 40


def test_a_page_gone_bad_is_not_put_aside_by_a_preemption(tmp_path: Path) -> None:
    """Preemption comes before the step's check, copies the pages and forgets them: it looks for itself."""
    bench = Bench(tmp_path, pages=9)
    save = saver(bench.pool, PAGE)
    for session in (0, 1, 2):
        bench.add(session, PROMPTS[session], save_kv=save)
    while not bench.alive[2].preemptions:
        victim = bench.alive[2]
        if victim.pages:
            tags = bench.pool.tags[victim.pages[0]]
            bench.pool.tags[victim.pages[0]] = tags + 99 if bench.pool.available == 0 else tags
        bench.step()
        if 2 in bench.errors:
            break
    bench.run()
    assert bench.errors[2].kind == "stale_tag"  # type: ignore[attr-defined]
    assert {session: bench.answers[session] for session in (0, 1)} == {s: greedy(PROMPTS[s], ANSWER) for s in (0, 1)}


def test_log_only_counts_once_and_goes_on(tmp_path: Path) -> None:
    bench = Bench(tmp_path, log_only=True)
    for session in (0, 1):
        bench.add(session, PROMPTS[session])
    bench.step()
    bench.pool.tags[bench.alive[1].pages[0]] += 1
    bench.run()
    assert bench.errors == {}
    assert bench.answers == {session: greedy(PROMPTS[session], ANSWER) for session in (0, 1)}
    assert bench.ledger.read().mismatches["stale_tag"] == 1


def test_log_only_ends_what_cannot_be_computed(tmp_path: Path) -> None:
    bench = Bench(tmp_path, log_only=True)
    for session in (0, 1):
        bench.add(session, PROMPTS[session])
    bench.step()
    outside(bench, bench.alive[1])
    bench.run()
    assert set(bench.errors) == {1}
    assert bench.answers[0] == greedy(PROMPTS[0], ANSWER)


def test_without_a_tracker_nothing_is_looked_at(tmp_path: Path) -> None:
    scheduler = Scheduler(BlockPool(tmp_path, "pages", 4, (1,), "float32", 4), PAGE, 8, 64)
    assert type(scheduler.tracker) is NoTracker
    assert scheduler.tracker.check(iter(())) == []


def test_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="kind: 'rust' is unknown; allowed: stale_tag"):
        IntegrityError("rust", "")
