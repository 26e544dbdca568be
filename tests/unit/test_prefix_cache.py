"""The prefix cache: who shares what, what never enters, and that a warm answer is a cold one, bit for bit."""

from __future__ import annotations

import random

import pytest
import torch

from tests.unit.test_decoder import make
from tests.unit.test_scheduler import GREEDY, Machine, alone, next_token, prompt_of, sequence
from tritone.engine import prefix_cache
from tritone.engine.engine import Engine
from tritone.engine.prefix_cache import PrefixCache
from tritone.engine.scheduler import Scheduler
from tritone.engine.sequence import Sequence
from tritone.kernels import default_kernels
from tritone.models.decoder import Decoder, load_decoder
from tritone.options import Sampling
from tritone.pools import FreeList

SIZE = 4
COMMON = list(range(100, 118))
"""Four pages and a half."""


def machine(pages: int = 40, **more: bool) -> Machine:
    return Machine(pages, SIZE, max_sequences=8, max_batch_tokens=16, cache=True, **more)


def serve(bench: Machine, session: int, prompt: list[int], count: int = 3, salt: str = "") -> int:
    """Run one request to its end; gives how many of its tokens came from the cache."""
    bench.add(sequence(session, prompt, count, salt=salt))
    bench.run()
    assert bench.finished[session] == alone(prompt, count, salt)
    return bench.cached[session]


@pytest.mark.parametrize(
    ("prompt", "cached"),
    [
        (COMMON, 16),
        ([*COMMON, 5, 6], 16),
        (COMMON[:16], 12),  # the last token is always computed
        (COMMON[:17], 16),
        (COMMON[:15], 12),
        (COMMON[:4], 0),
        (COMMON[:5], 4),
        ([*COMMON[:9], 1, *COMMON[10:]], 8),
        ([1, *COMMON[1:]], 0),
        (COMMON[4:], 0),
    ],
)
def test_full_pages_of_the_same_beginning_are_found(prompt: list[int], cached: int) -> None:
    bench = machine()
    assert serve(bench, 1, COMMON) == 0
    assert serve(bench, 2, prompt) == cached


def test_a_prompt_on_its_way_skips_what_another_has_computed_meanwhile() -> None:
    long = prompt_of(random.Random(8), 90)
    bench = machine(pages=60)
    bench.add(sequence(1, long, 3))
    bench.step()
    bench.add(sequence(2, [*long[:80], 7, 7], 3))
    computed = 0
    while bench.live:
        computed += sum(n for _, n in bench.step().chunks)
    assert bench.finished == {1: alone(long, 3), 2: alone([*long[:80], 7, 7], 3)}
    assert bench.cached[2] == 0
    assert computed < 90 + 30 + 10


def test_answers_enter_as_prompts_do() -> None:
    bench = machine()
    serve(bench, 1, COMMON, 10)
    # 27 tokens have been computed of these: the last one was only chosen.
    assert serve(bench, 2, COMMON + alone(COMMON, 10) + [3]) == 24


def test_a_page_computed_twice_is_kept_once() -> None:
    bench = machine()
    for session in (1, 2):
        bench.add(sequence(session, COMMON, 8))
    bench.run()
    assert (bench.cached, len(bench.cache or ())) == ({1: 0, 2: 0}, 6)
    assert bench.pages.cached == 6
    assert serve(bench, 3, COMMON) == 16


def test_different_salts_never_share() -> None:
    bench = machine(100)
    salts = ["", "a", "b", "ab", "A", "\udcff", "a\0"]
    for session, salt in enumerate(salts):
        assert serve(bench, session, COMMON, salt=salt) == 0
    for session, salt in enumerate(salts):
        assert serve(bench, 100 + session, COMMON, salt=salt) == 16


class Colliding(bytes):
    def __hash__(self) -> int:
        return 1


def test_where_all_hashes_collide_tokens_and_salts_still_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    page_key, salt_key = prefix_cache.page_key, prefix_cache.salt_key
    monkeypatch.setattr(prefix_cache, "page_key", lambda *given: Colliding(page_key(*given)))
    monkeypatch.setattr(prefix_cache, "salt_key", lambda salt: Colliding(salt_key(salt)))
    bench = machine(100)
    chance = random.Random(3)
    for session in range(30):
        prompt = COMMON[: chance.randint(1, 18)] + prompt_of(chance, chance.randint(1, 6))
        serve(bench, session, prompt, salt=chance.choice(["", "a", "b"]))
    assert serve(bench, 100, COMMON, salt="a") % SIZE == 0
    assert serve(bench, 101, COMMON, salt="a") == 16
    assert serve(bench, 102, COMMON, salt="c") == 0


def test_an_aborted_prompt_leaves_nothing_behind() -> None:
    prompt = prompt_of(random.Random(1), 60)
    for steps in range(4):
        bench = machine()
        bench.add(sequence(1, prompt, 3))
        for _ in range(steps):
            bench.step()
        bench.abort(1)
        assert (len(bench.cache or ()), bench.pages.cached) == (0, 0)
        assert serve(bench, 2, prompt) == 0


def test_an_answer_that_is_cut_short_leaves_what_it_had_computed() -> None:
    bench = machine()
    bench.add(sequence(1, COMMON, 30))
    for _ in range(10):
        bench.step()
    bench.abort(1)
    assert serve(bench, 2, COMMON) == 16


@pytest.mark.parametrize("imported", [False, True])
def test_a_neighbour_that_leaves_at_any_step_changes_nothing(imported: bool) -> None:
    """A and B share a prefix; A is cancelled at each step while B runs."""

    def add(bench: Machine, session: int, prompt: list[int], count: int) -> None:
        if imported:
            bench.add_imported(session, prompt, count, save=True)
        else:
            bench.add(sequence(session, prompt, count))

    first, second = [*COMMON, 1, 2, 3], [*COMMON, 4, 5]
    for pages in (14, 40):
        for warm in (False, True):
            for moment in range(16):
                bench = machine(pages)
                if warm:
                    serve(bench, 3, COMMON)
                add(bench, 1, first, 14)
                add(bench, 2, second, 14)
                for _ in range(moment):
                    bench.step()
                if 1 in bench.live:
                    bench.abort(1)
                bench.run()
                assert bench.finished[2] == alone(second, 14)
                assert bench.pages.available == pages


def test_the_least_recently_used_prefix_goes_first() -> None:
    bench = machine(pages=18)
    chance = random.Random(5)
    old, recent, new = (prompt_of(chance, 17) for _ in range(3))
    serve(bench, 1, old)
    serve(bench, 2, recent)
    assert serve(bench, 3, old) == 16
    serve(bench, 4, prompt_of(chance, 49))
    # 13 pages were needed, 18 - 8 were free: of `recent` its three last pages went.
    assert serve(bench, 5, recent[:5]) == 4
    assert serve(bench, 6, recent) == 4
    assert serve(bench, 7, new) == 0


def test_cached_pages_count_as_free_for_admission() -> None:
    bench = machine(pages=10)
    serve(bench, 1, prompt_of(random.Random(1), 33))
    assert bench.pages.cached == 8
    longest = prompt_of(random.Random(2), 36)
    bench.add(sequence(2, longest, 3))
    bench.step()
    assert bench.admitted == [1, 2]
    bench.run()
    assert bench.finished[2] == alone(longest, 3)


def test_a_shared_prefix_lets_more_sequences_run() -> None:
    """Eight sequences of six pages in sixteen pages, where five of each are the same."""
    bench = machine(pages=24)
    long = prompt_of(random.Random(1), 21)
    serve(bench, 1, long, 1)
    for session in range(2, 10):
        bench.add(sequence(session, [*long[:20], session], 2))
    bench.step()
    assert len(bench.scheduler.running) == 8
    bench.run()
    assert bench.finished == {1: alone(long, 1)} | {s: alone([*long[:20], s], 2) for s in range(2, 10)}


def test_a_preempted_sequence_goes_on_from_the_cache() -> None:
    bench = machine(pages=12)
    prompts = {session: [session] * 11 for session in (1, 2, 3)}
    sequences = [sequence(session, prompt, 20) for session, prompt in prompts.items()]
    for new in sequences:
        bench.add(new)
    resumed = []
    while bench.live:
        waiting = [s for s in bench.scheduler.waiting if s.preemptions]
        bench.step()
        resumed += [s.cached for s in waiting if s in bench.scheduler.running]
    assert resumed and max(resumed) >= 8
    assert bench.finished == {session: alone(prompt, 20) for session, prompt in prompts.items()}


@pytest.mark.parametrize("mixed", [False, True])
def test_a_preempted_import_goes_on_with_the_kv_it_had(mixed: bool) -> None:
    bench = machine(pages=12, mixed=mixed)
    prompts = {session: [session] * 11 for session in (1, 2, 3)}
    for session, prompt in prompts.items():
        bench.add_imported(session, prompt, 20, save=True)
    bench.run()
    assert bench.restores > 0
    assert set(bench.imports.values()) == {1}
    assert bench.finished == {s: alone(prompt, 20, foreign=11 if mixed else 0) for s, prompt in prompts.items()}


def test_imports_share_with_imports_and_in_one_precision_with_all() -> None:
    for mixed in (False, True):
        bench = machine(mixed=mixed)
        count = 0 if mixed else 16
        assert serve(bench, 1, COMMON) == 0
        bench.add_imported(2, COMMON, 3)
        bench.run()
        assert bench.cached[2] == count
        bench.add_imported(3, COMMON, 3)
        bench.run()
        assert bench.cached[3] == 16
        assert serve(bench, 4, COMMON) == 16


def test_a_waiting_import_whose_kv_is_given_back_is_computed() -> None:
    bench = machine(mixed=True)
    bench.add_imported(1, COMMON, 3)
    bench.run()
    bench.add_imported(2, COMMON, 3)
    bench.live[2].drop_import()
    bench.run()
    # Its first token is the one that came with it.
    first = next_token(COMMON, foreign=len(COMMON))
    assert bench.finished[2] == [first, *alone([*COMMON, first], 2)]
    assert bench.cached[2] == 0


def test_an_import_that_waited_beside_its_pages_in_the_cache() -> None:
    """Its beginning was looked up as imported, before its KV was given back."""
    bench = machine(pages=11, mixed=True)
    bench.add_imported(1, COMMON, 3)
    bench.run()
    bench.add_imported(2, COMMON, 20)
    bench.add_imported(3, [*COMMON, *range(20)], 3)
    bench.step()
    assert bench.admitted == [1, 2]
    bench.live[3].drop_import()
    bench.run()
    assert bench.cached[3] == 0


def test_a_preempted_import_without_a_copy_is_computed_as_ones_own() -> None:
    bench = machine(pages=12, mixed=True)
    for session in (1, 2, 3):
        bench.add_imported(session, [session] * 11, 20)
    preempted = set()
    while bench.live:
        bench.step()
        preempted |= {s.session for s in bench.live.values() if s.preemptions}
        assert all(bool(s.foreign) != bool(s.preemptions) for s in bench.live.values())
    assert preempted
    assert serve(bench, 4, [3] * 11) == 8


def test_everything_can_be_forgotten() -> None:
    bench = machine()
    serve(bench, 1, COMMON, salt="a")
    assert bench.cache is not None
    bench.cache.clear()
    assert (len(bench.cache), bench.pages.cached) == (0, 0)
    assert not bench.cache._root.children
    assert serve(bench, 2, COMMON, salt="a") == 0


# With a real decoder


PAGE = 16


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    if default_kernels().name == "torch":
        pytest.skip("only the native kernels give a token the same bits however its prompt is cut")
    path = tmp_path_factory.mktemp("qwen3")
    make("qwen3", path)
    return load_decoder(path, torch.bfloat16)


class Bits:
    """An engine over the decoder that keeps each token with the bits of the hidden state it was chosen from."""

    def __init__(self, decoder: Decoder, pages: int, chunk: int, cache: bool) -> None:
        self.pages = FreeList(pages)
        self.kv = torch.zeros((pages, *decoder.config.page_shape(PAGE)), dtype=torch.bfloat16)
        prefixes = PrefixCache(self.pages, PAGE) if cache else None
        self.engine = Engine(decoder, self.kv, Scheduler(self.pages, PAGE, 8, chunk, cache=prefixes))
        self.answers: dict[int, list[tuple[int, bytes]]] = {}
        self.cached: dict[int, int] = {}
        self.preempted = 0

    def run(self, *sequences: Sequence) -> None:
        scheduler = self.engine.scheduler
        for new in sequences:
            scheduler.add(new)
        while len(scheduler):
            for output in self.engine.step():
                done = output.sequence
                assert output.error is None and output.hidden is not None
                self.cached.setdefault(done.session, done.cached)
                bits = output.hidden.view(torch.int16).numpy().tobytes()
                self.answers.setdefault(done.session, []).append((done.tokens[-1], bits))
                if done.answer_length == done.max_tokens:
                    self.preempted += done.preemptions
                    scheduler.remove(done)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.3, seed=5)], ids=["greedy", "sampled"])
def test_warm_equals_cold_to_the_bit(decoder: Decoder, sampling: Sampling) -> None:
    chance = random.Random(9)
    shared = [chance.randrange(120) for _ in range(80)]
    prompts = {
        session: shared[: chance.randint(1, 80)] + [chance.randrange(120) for _ in range(chance.randint(1, 20))]
        for session in range(12)
    }

    def made(session: int) -> Sequence:
        ids = prompts[session]
        return Sequence(session, list(ids), len(ids), sampling, 25)

    cold: dict[int, list[tuple[int, bytes]]] = {}
    for session in prompts:
        alone = Bits(decoder, 20, 200, cache=False)
        alone.run(made(session))
        cold |= alone.answers
    one_by_one = Bits(decoder, 60, 64, cache=True)
    for session in prompts:
        one_by_one.run(made(session))
    assert one_by_one.answers == cold
    assert sum(one_by_one.cached.values()) > 200
    scarce = Bits(decoder, 10, 24, cache=True)
    scarce.run(*map(made, prompts))
    assert scarce.answers == cold
    assert scarce.preempted > 0 and sum(scarce.cached.values()) > 0
    scarce.answers = {}
    scarce.run(*map(made, prompts))
    assert scarce.answers == cold
