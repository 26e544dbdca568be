"""The scheduler, with a rule for a model: its pages hold token ids, so a wrong page is a wrong token."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from tritone.engine.prefix_cache import PrefixCache
from tritone.engine.scheduler import Plan, Scheduler
from tritone.engine.sequence import Sequence
from tritone.options import Sampling
from tritone.pools.free_list import FreeList

GREEDY = Sampling(temperature=0.0)


def kv_of(tokens: list[int], salt: str = "", foreign: int = 0) -> list[int]:
    """The rule: what lies in the pages after each token depends on every token before and on their order, on the salt, and
    on how many of them another engine computed."""
    value, values = 17 + sum(salt.encode("utf-8", "surrogatepass")), []
    for place, token in enumerate(tokens):
        value = (value * 31 + token + (5 if place < foreign else 0)) % (2**61 - 1)
        values.append(value)
    return values


def next_token(tokens: list[int], salt: str = "", foreign: int = 0) -> int:
    return kv_of(tokens, salt, foreign)[-1] % 1009


def alone(prompt: list[int], count: int, salt: str = "", foreign: int = 0) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, salt, foreign))
    return tokens[len(prompt) :]


def sequence(session: int, prompt: list[int], max_tokens: int = 4, **more: object) -> Sequence:
    return Sequence(session, list(prompt), len(prompt), GREEDY, max_tokens, **more)  # type: ignore[arg-type]


class Machine:
    """Runs plans as an engine would, and looks at every promise of the scheduler while it does.

    ``mixed``: imported KV differs from what is computed here."""

    def __init__(
        self, pages: int, page_size: int, max_sequences: int, max_batch_tokens: int, *, cache: bool = False, mixed: bool = False
    ) -> None:
        self.pages = FreeList(pages)
        self.mixed = mixed
        self.cache = PrefixCache(self.pages, page_size, mixed=mixed) if cache else None
        self.scheduler = Scheduler(self.pages, page_size, max_sequences, max_batch_tokens, cache=self.cache)
        self.memory: dict[tuple[int, int], int] = {}
        self.live: dict[int, Sequence] = {}
        self.admitted: list[int] = []
        self.cached: dict[int, int] = {}
        self.imports: dict[int, int] = {}
        self.restores = 0
        self.known: dict[int, tuple[int, list[int]]] = {}
        self.finished: dict[int, list[int]] = {}

    def add(self, new: Sequence) -> None:
        self.live[new.session] = new
        self.scheduler.add(new)

    def add_imported(self, session: int, prompt: list[int], max_tokens: int, *, save: bool = False, salt: str = "") -> None:
        """As decode does: the prompt's KV comes from elsewhere, the first token is already known."""
        new = sequence(
            session,
            prompt,
            max_tokens,
            imported=len(prompt),
            foreign=len(prompt),
            import_kv=self._import,
            save_kv=self._save if save else None,
            salt=salt,
        )
        new.append(next_token(prompt, salt, len(prompt) if self.mixed else 0))
        self.add(new)

    def kv(self, s: Sequence, length: int) -> list[int]:
        foreign = s.foreign if self.mixed else 0
        known, values = self.known.get(s.session, (foreign, []))
        if known != foreign or len(values) < length:
            values = kv_of(s.tokens, s.salt, foreign)
            self.known[s.session] = foreign, values
        return values[:length]

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
            values = self.kv(s, s.computed + count)
            for position in range(s.computed, s.computed + count):
                self.memory[self._place(s, position)] = values[position]
        for s, count in spans:
            context = [self.memory[self._place(s, position)] for position in range(s.computed + count)]
            assert context == self.kv(s, s.computed + count), "a page holds something else"
            chosen[s.session] = context[-1] % 1009
        for s in self.scheduler.computed(plan):
            assert s.pending == 0
            self.scheduler.enter(s)
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
        values = self.kv(s, s.prompt_length)
        for position in range(s.cached, s.prompt_length):
            self.memory[self._place(s, position)] = values[position]

    def _save(self, s: Sequence) -> Callable[[Sequence], None]:
        saved = [self.memory[self._place(s, position)] for position in range(s.computed)]

        def restore(s: Sequence) -> None:
            self.restores += 1
            assert s.computed == len(saved)
            for position in range(s.cached, len(saved)):
                self.memory[self._place(s, position)] = saved[position]

        return restore

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
                self.cached[s.session] = s.cached
        for s in scheduler.waiting:
            assert not s.pages
            assert s.computed == 0

    def _check_pages(self) -> None:
        held = Counter(page for s in self.live.values() for page in s.pages)
        entered = self.cache.pages() if self.cache is not None else set()
        assert {page for page, count in held.items() if count > 1} <= entered, "a page belongs to two sequences"
        assert len(held) + self.pages.available == self.pages.total
        every = range(self.pages.total)
        assert list(map(self.pages.holders, every)) == [held[page] for page in every]
        assert {page for page in every if self.pages.is_kept(page)} == entered
        assert self.pages.cached == len(entered - set(held))


def prompt_of(chance: random.Random, length: int) -> list[int]:
    return [chance.randrange(1009) for _ in range(length)]


def prompts_that_share(chance: random.Random, longest: int) -> Callable[[], list[int]]:
    """Prompts of which many begin alike: cut from one of three texts, some with an end of their own."""
    texts = [prompt_of(chance, longest) for _ in range(3)]

    def draw() -> list[int]:
        length = chance.randint(1, longest)
        text = chance.choice(texts)[:length]
        own = chance.randint(0, length) if chance.random() < 0.5 else 0
        return text[: length - own] + prompt_of(chance, own)

    return draw


@pytest.mark.parametrize("mode", ["plain", "saved", "cached", "cached and saved", "mixed"])
@pytest.mark.parametrize("seed", range(24))
def test_random_traffic(seed: int, mode: str) -> None:
    chance = random.Random(seed)
    page_size = chance.choice([1, 2, 4, 16])
    longest, most = chance.choice([(12, 6), (40, 10), (90, 30)])
    smallest = -(-(longest + most) // page_size)
    pages = smallest + chance.choice([0, 1, 3, smallest, 10 * smallest])
    max_sequences = chance.choice([1, 2, 5, 16])
    budget = chance.choice([max_sequences, 16, 64, 200])
    mixed, saved = mode == "mixed", mode in ("saved", "cached and saved", "mixed")
    machine = Machine(pages, page_size, max_sequences, budget, cache=mode not in ("plain", "saved"), mixed=mixed)
    if chance.random() < 0.5:
        machine.scheduler.max_chunk_tokens = chance.choice([1, 8])
    draw = prompts_that_share(chance, longest)
    waiting = list(range(24))
    expected: dict[int, list[int]] = {}
    aborted: set[int] = set()
    imported: set[int] = set()
    for _ in range(20_000):
        while waiting and chance.random() < 0.4:
            session = waiting.pop(0)
            prompt, count, salt = draw(), chance.randint(2, most), chance.choice(["", "", "one", "two"])
            if chance.random() < 0.5:
                imported.add(session)
                expected[session] = alone(prompt, count, salt, len(prompt) if mixed else 0)
                machine.add_imported(session, prompt, count, save=saved, salt=salt)
            else:
                expected[session] = alone(prompt, count, salt)
                machine.add(sequence(session, prompt, count, salt=salt))
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
    if machine.cache is not None:
        machine.cache.clear()
        assert (len(machine.cache), machine.pages.cached, machine.pages.available) == (0, 0, pages)


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
    assert planned == [([1], [(2, 12), (3, 3)]), ([1], [(2, 8), (3, 7)]), ([1, 2], [(3, 10)])]


def test_a_short_prompt_need_not_wait_for_a_long_one() -> None:
    machine = Machine(pages=200, page_size=16, max_sequences=4, max_batch_tokens=64)
    machine.add(sequence(1, [1] * 1000, 2))
    machine.step()
    machine.add(sequence(2, [2] * 15, 2))
    machine.step()
    assert machine.live[2].answer_length == 1
    counts = []
    while machine.live[1].pending > 64:
        counts.append(sum(n for _, n in machine.step().chunks))
    # What nobody behind it wants goes to the long one again.
    assert set(counts[2:]) == {64}


def test_chunks_beside_decodes_have_a_limit_of_their_own() -> None:
    machine = Machine(pages=200, page_size=16, max_sequences=4, max_batch_tokens=512)
    machine.scheduler.max_chunk_tokens = 8
    machine.add(sequence(1, [1] * 100, 40))
    assert [n for _, n in machine.step().chunks] == [100]
    machine.add(sequence(2, [2] * 100, 2))
    for _ in range(12):
        plan = machine.step()
        assert (len(plan.decodes), [n for _, n in plan.chunks]) == (1, [8])
    machine.run()


def test_imports_beside_decodes_come_few_at_a_time() -> None:
    machine = Machine(pages=400, page_size=16, max_sequences=8, max_batch_tokens=512)
    machine.scheduler.max_chunk_tokens = 8
    machine.add(sequence(1, [1], 40))
    machine.step()
    for session in range(2, 8):
        machine.add_imported(session, [session] * 200, 10)
    assert [len(machine.step().imports) for _ in range(4)] == [2, 2, 2, 0]
    machine.run()


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
