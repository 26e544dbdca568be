"""The scheduler, with a rule for a model: its pages hold token ids, so a wrong page is a wrong token."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tritone.engine.scheduler import Plan, Scheduler
from tritone.engine.sequence import Sequence
from tritone.options import Sampling
from tritone.pools.free_list import FreeList

GREEDY = Sampling(temperature=0.0)


def next_token(tokens: list[int]) -> int:
    """The rule: depends on every token before and on the order of them."""
    value = 17
    for token in tokens:
        value = (value * 31 + token) % 1009
    return value


def alone(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def sequence(session: int, prompt: list[int], max_tokens: int = 4, **more: object) -> Sequence:
    return Sequence(session, list(prompt), len(prompt), GREEDY, max_tokens, **more)  # type: ignore[arg-type]


class Machine:
    """Runs plans as an engine would, and looks at every promise of the scheduler while it does."""

    def __init__(self, pages: int, page_size: int, max_sequences: int, max_batch_tokens: int) -> None:
        self.pages = FreeList(pages)
        self.scheduler = Scheduler(self.pages, page_size, max_sequences, max_batch_tokens)
        self.memory: dict[tuple[int, int], int] = {}
        self.live: dict[int, Sequence] = {}
        self.admitted: list[int] = []
        self.imports: dict[int, int] = {}
        self.finished: dict[int, list[int]] = {}

    def add(self, new: Sequence) -> None:
        self.live[new.session] = new
        self.scheduler.add(new)

    def add_imported(self, session: int, prompt: list[int], max_tokens: int) -> None:
        """As decode does: the prompt's KV comes from elsewhere, the first token is already known."""
        new = sequence(session, prompt, max_tokens, imported=len(prompt), import_kv=self._import)
        new.append(next_token(prompt))
        self.add(new)

    def abort(self, session: int) -> None:
        self.scheduler.remove(self.live.pop(session))

    def step(self) -> Plan:
        before = {s.session: s.preemptions for s in self.live.values()}
        up_to_date = [s.session for s in self.scheduler.running if s.pending == 1]
        plan = self.scheduler.schedule()
        self._check(plan, before, up_to_date)
        for imported in plan.imports:
            assert imported.import_kv is not None
            imported.import_kv(imported)
        spans = [(s, 1) for s in plan.decodes] + plan.chunks
        chosen: dict[int, int] = {}
        for s, count in spans:
            for position in range(s.computed, s.computed + count):
                self.memory[self._place(s, position)] = s.tokens[position]
        for s, count in spans:
            context = [self.memory[self._place(s, position)] for position in range(s.computed + count)]
            chosen[s.session] = next_token(context)
        for s in self.scheduler.computed(plan):
            assert s.pending == 0
            s.append(chosen[s.session])
            if s.answer_length >= s.max_tokens:
                self.finished[s.session] = s.tokens[s.prompt_length :]
                self.scheduler.remove(s)
                del self.live[s.session]
        self._check_pages()
        return plan

    def run(self, limit: int = 10_000) -> int:
        for steps in range(limit):
            if not self.live:
                return steps
            assert self.step(), "nothing planned while sequences live"
        raise AssertionError("the sequences did not end")

    def _place(self, s: Sequence, position: int) -> tuple[int, int]:
        size = self.scheduler.page_size
        return s.pages[position // size], position % size

    def _import(self, s: Sequence) -> None:
        self.imports[s.session] = self.imports.get(s.session, 0) + 1
        assert s.preemptions == 0
        assert s.computed == s.prompt_length
        for position in range(s.prompt_length):
            self.memory[self._place(s, position)] = s.tokens[position]

    def _check(self, plan: Plan, preemptions: dict[int, int], up_to_date: list[int]) -> None:
        scheduler = self.scheduler
        spans = [(s, 1) for s in plan.decodes] + plan.chunks
        assert sum(count for _, count in spans) <= scheduler.max_batch_tokens
        assert len({s.session for s, _ in spans}) == len(spans)
        assert len(scheduler.running) <= scheduler.max_sequences
        assert len(scheduler) == len(self.live)
        for s, count in spans:
            assert s in scheduler.running
            assert 1 <= count <= s.pending
            assert len(s.pages) * scheduler.page_size >= s.computed + count
        assert all(s.pending == 1 for s in plan.decodes)
        assert all(s.pending > 1 for s, _ in plan.chunks)
        # No chunk takes the place of a decode: whoever was up to date decodes, unless it lost its pages.
        decoding = {s.session for s in plan.decodes}
        for session in up_to_date:
            assert session in decoding or self.live[session].preemptions > preemptions[session]
        for s in plan.imports:
            assert s.imported
            assert any(s is other for other, _ in spans)
        for s in scheduler.running:
            if s.session not in self.admitted:
                self.admitted.append(s.session)
        for s in scheduler.waiting:
            assert not s.pages
            assert s.computed == 0
        self._check_pages()

    def _check_pages(self) -> None:
        held = [page for s in self.live.values() for page in s.pages]
        assert len(held) == len(set(held)), "a page belongs to two sequences"
        assert len(held) + self.pages.available == self.pages.total


def prompt_of(chance: random.Random, length: int) -> list[int]:
    return [chance.randrange(1009) for _ in range(length)]


@pytest.mark.parametrize("seed", range(60))
def test_random_traffic(seed: int) -> None:
    chance = random.Random(seed)
    page_size = chance.choice([1, 2, 4, 16])
    longest, most = chance.choice([(12, 6), (40, 10), (90, 30)])
    smallest = -(-(longest + most) // page_size)
    pages = smallest + chance.choice([0, 1, 3, smallest, 10 * smallest])
    max_sequences = chance.choice([1, 2, 5, 16])
    machine = Machine(pages, page_size, max_sequences, chance.choice([max_sequences, 16, 64, 200]))
    waiting = list(range(40))
    expected: dict[int, list[int]] = {}
    aborted: set[int] = set()
    imported: set[int] = set()
    for _ in range(20_000):
        while waiting and chance.random() < 0.4:
            session = waiting.pop(0)
            prompt, count = prompt_of(chance, chance.randint(1, longest)), chance.randint(2, most)
            expected[session] = alone(prompt, count)
            if chance.random() < 0.5:
                imported.add(session)
                machine.add_imported(session, prompt, count)
            else:
                machine.add(sequence(session, prompt, count))
        if machine.live and chance.random() < 0.02:
            victim = chance.choice(sorted(machine.live))
            aborted.add(victim)
            machine.abort(victim)
        if machine.live:
            assert machine.step(), "nothing planned while sequences live"
        elif not waiting:
            break
    assert not machine.live
    assert machine.pages.available == pages
    assert machine.finished == {session: expected[session] for session in expected if session not in aborted}
    first_come = [session for session in machine.admitted if session not in aborted]
    assert first_come == sorted(first_come)
    assert {session for session in imported if session not in aborted} <= set(machine.imports) <= imported
    assert set(machine.imports.values()) <= {1}


def test_the_random_traffic_does_preempt() -> None:
    machine = Machine(pages=6, page_size=2, max_sequences=4, max_batch_tokens=16)
    sequences = [sequence(session, [session] * 3, 8) for session in range(4)]
    for new in sequences:
        machine.add(new)
    machine.run()
    assert sum(new.preemptions for new in sequences) > 0
    assert machine.finished == {session: alone([session] * 3, 8) for session in range(4)}


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("imported", [False, True])
def test_prompts_around_a_page(length: int, imported: bool) -> None:
    prompt = prompt_of(random.Random(length), length)
    machine = Machine(pages=8, page_size=16, max_sequences=4, max_batch_tokens=64)
    if imported:
        machine.add_imported(1, prompt, 40)
    else:
        machine.add(sequence(1, prompt, 40))
    plan = machine.step()
    # Room for the prompt and for the token it makes.
    assert len((plan.decodes or [plan.chunks[0][0]])[0].pages) == -(-(length + 1 + imported) // 16)
    machine.run()
    assert machine.finished == {1: alone(prompt, 40)}
    assert machine.pages.available == 8


def test_a_long_prompt_comes_in_chunks_of_the_budget() -> None:
    machine = Machine(pages=10, page_size=16, max_sequences=4, max_batch_tokens=16)
    machine.add(sequence(1, [5] * 40, 3))
    counts = [[count for _, count in machine.step().chunks] for _ in range(3)]
    assert counts == [[16], [16], [8]]


def test_decodes_come_first_and_chunks_share_the_rest() -> None:
    machine = Machine(pages=20, page_size=16, max_sequences=4, max_batch_tokens=16)
    machine.add(sequence(1, [5], 50))
    machine.step()
    machine.add(sequence(2, [6] * 20, 5))
    machine.add(sequence(3, [7] * 20, 5))
    plans = [machine.step() for _ in range(3)]
    planned = [
        ([s.session for s in plan.decodes], [(s.session, n) for s, n in plan.chunks]) for plan in plans
    ]
    assert planned == [([1], [(2, 15)]), ([1], [(2, 5), (3, 10)]), ([1, 2], [(3, 10)])]


def test_the_budget_holds_with_more_sequences_than_tokens() -> None:
    machine = Machine(pages=64, page_size=16, max_sequences=24, max_batch_tokens=16)
    for session in range(24):
        machine.add(sequence(session, [session], 8))
    machine.run()
    assert machine.finished == {session: alone([session], 8) for session in range(24)}


def test_admission_is_first_come_first_served_even_where_a_later_one_would_fit() -> None:
    machine = Machine(pages=5, page_size=16, max_sequences=4, max_batch_tokens=100)
    machine.add(sequence(1, [1] * 40, 2))
    machine.add(sequence(2, [2] * 60, 2))
    machine.add(sequence(3, [3], 2))
    machine.step()
    assert machine.admitted == [1]
    machine.run()
    assert machine.admitted == [1, 2, 3]


def test_no_more_sequences_run_than_allowed() -> None:
    machine = Machine(pages=100, page_size=16, max_sequences=2, max_batch_tokens=100)
    for session in range(5):
        machine.add(sequence(session, [session], 3))
    machine.step()
    assert (len(machine.scheduler.running), len(machine.scheduler.waiting)) == (2, 3)
    machine.run()
    assert machine.finished == {session: alone([session], 3) for session in range(5)}


def test_the_youngest_gives_way_and_waits_first_in_line() -> None:
    machine = Machine(pages=7, page_size=4, max_sequences=3, max_batch_tokens=100)
    old, young, queued = sequence(1, [1] * 7, 9), sequence(2, [2] * 7, 9), sequence(3, [3] * 11, 2)
    for new in (old, young, queued):
        machine.add(new)
    while not young.preemptions:
        machine.step()
    assert old.preemptions == 0
    assert list(machine.scheduler.waiting) == [young, queued]
    assert (young.pages, young.computed) == ([], 0)
    machine.run()
    assert machine.finished == {1: alone([1] * 7, 9), 2: alone([2] * 7, 9), 3: alone([3] * 11, 2)}


def test_a_preempted_import_is_computed_again_not_imported_again() -> None:
    machine = Machine(pages=7, page_size=4, max_sequences=3, max_batch_tokens=100)
    for session in (1, 2):
        machine.add_imported(session, [session] * 7, 12)
    young = machine.live[2]
    machine.run()
    assert young.preemptions > 0
    assert machine.imports == {1: 1, 2: 1}
    assert machine.finished == {session: alone([session] * 7, 12) for session in (1, 2)}


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(lambda machine: None, id="waiting"),
        pytest.param(lambda machine: machine.step(), id="half prefilled"),
        pytest.param(lambda machine: [machine.step() for _ in range(6)], id="decoding"),
    ],
)
def test_abort_at_any_point_gives_the_pages_back(moment: Callable[[Machine], object]) -> None:
    machine = Machine(pages=10, page_size=4, max_sequences=4, max_batch_tokens=4)
    machine.add(sequence(1, [1] * 10, 30))
    moment(machine)
    machine.abort(1)
    assert machine.pages.available == 10
    assert len(machine.scheduler) == 0
    assert not machine.step()


def test_abort_after_preemption() -> None:
    machine = Machine(pages=6, page_size=2, max_sequences=2, max_batch_tokens=16)
    for session in (1, 2):
        machine.add(sequence(session, [session] * 3, 8))
    young = machine.live[2]
    while not young.preemptions:
        machine.step()
    machine.abort(2)
    machine.run()
    assert machine.finished == {1: alone([1] * 3, 8)}
    assert machine.pages.available == 6


def test_pages_can_be_kept_for_a_hand_over() -> None:
    machine = Machine(pages=4, page_size=4, max_sequences=2, max_batch_tokens=16)
    new = sequence(1, [1] * 5, 9)
    machine.add(new)
    machine.step()
    machine.scheduler.remove(new, keep_pages=True)
    assert len(new.pages) == 2
    assert machine.pages.available == 2
    assert len(machine.scheduler) == 0


def test_removing_a_stranger_is_an_error() -> None:
    machine = Machine(pages=4, page_size=4, max_sequences=2, max_batch_tokens=16)
    machine.add(sequence(1, [1], 2))
    with pytest.raises(ValueError, match="not in deque"):
        machine.scheduler.remove(sequence(1, [1], 2))


def test_a_sequence_that_fills_the_pool_to_its_last_slot_ends() -> None:
    machine = Machine(pages=3, page_size=4, max_sequences=2, max_batch_tokens=16)
    machine.add(sequence(1, [1] * 4, 8))
    machine.add(sequence(2, [2] * 11, 1))
    machine.run()
    assert machine.finished == {1: alone([1] * 4, 8), 2: alone([2] * 11, 1)}


def test_an_empty_plan_is_false() -> None:
    machine = Machine(pages=3, page_size=4, max_sequences=2, max_batch_tokens=16)
    assert not machine.scheduler.schedule()
    assert len(machine.scheduler) == 0


def test_a_sequence_counts_its_answer_only() -> None:
    new = sequence(1, [4, 4, 5])
    for token in (4, 9, 9):
        new.append(token)
    assert new.counts == {4: 1, 9: 2}
    assert (new.answer_length, new.pending) == (3, 6)
