"""The prefix cache through the whole server: what a client sees of it, and what it must not see."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from typing import Any

import pytest

from tests.server.helpers import (
    EXPORT_SECONDS,
    Answer,
    Request,
    Scrape,
    ask,
    ask_together,
    fresh,
    in_threads,
    nothing_left_behind,
    wait_idle,
)
from tests.server.reference import prose
from tests.server.serving import MAX_CONTEXT, PAGE_SIZE, make_deployment
from tritone.supervisor import Server

GREEDY = {"input_format": "token_ids", "temperature": 0.0, "logprobs": 3, "max_tokens": 16, "ignore_eos": True}


@pytest.fixture(scope="module")
def words(tokenizer: Any) -> list[int]:
    return tokenizer.encode(prose(77, 100))[:1200]


def sent(server: Server, ids: list[int], **options: Any) -> Answer:
    answer = ask(server, "chat", json.dumps(ids), **(GREEDY | options))
    answer.check_complete()
    assert answer.usage["prompt_tokens"] == len(ids)
    return answer


def cached(answer: Answer) -> int:
    return answer.usage["cached_tokens"]


def test_the_second_time_is_faster_and_the_same(server: Server, words: list[int], unharmed: None) -> None:
    for length in (1, PAGE_SIZE, PAGE_SIZE + 1, 10 * PAGE_SIZE, 1199):
        salt = fresh()
        first, second = (sent(server, words[:length], **salt) for _ in range(2))
        assert (cached(first), cached(second)) == (0, (length - 1) // PAGE_SIZE * PAGE_SIZE)
        assert second.logprobs == first.logprobs  # every digit of them
        assert second.text == first.text
    cold, warm = first.first("text"), second.first("text")
    assert cold is not None and warm is not None
    print(f"time to first token of 1199 tokens: {cold:.3f} s, then {warm:.3f} s")
    assert warm < cold / 2


def test_different_salts_share_nothing(server: Server, words: list[int], unharmed: None) -> None:
    one, other, ids = fresh(), fresh(), words[:400]
    answers = [sent(server, ids, **salt) for salt in (one, other, one, other)]
    assert [cached(answer) for answer in answers] == [0, 0, 384, 384]
    assert len({json.dumps(answer.logprobs) for answer in answers}) == 1
    unsalted = [sent(server, words[1:401]) for _ in range(2)]
    assert [cached(answer) for answer in unsalted] == [0, 384]


def test_a_conversation_finds_its_earlier_turns(server: Server, unharmed: None) -> None:
    salt, turns = fresh(), [{"role": "user", "content": prose(5, 20)}]
    seen = []
    for _ in range(3):
        answer = ask(server, "chat", turns, temperature=0.0, max_tokens=20, **salt)
        seen.append((answer.usage["prompt_tokens"], cached(answer)))
        turns += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "Go on."}]
    assert seen[0][1] == 0
    for (before, _), (_, found) in pairwise(seen):
        assert before - 2 * PAGE_SIZE < found < before + 1


def test_16_at_once_with_a_shared_beginning(server: Server, words: list[int], unharmed: None) -> None:
    prompts = [words[: 100 + 20 * (n % 4)] + words[600 + n : 620 + 3 * n] for n in range(16)]
    alone = [sent(server, ids, **fresh()) for ids in prompts]
    for options in (fresh(), {}):
        for _ in range(2):
            asked = [(json.dumps(ids), GREEDY | options) for ids in prompts]
            together = ask_together(server, "chat", asked)
            for answer, expected in zip(together, alone, strict=True):
                answer.check_complete()
                assert answer.tokens == expected.tokens
        assert all(cached(answer) >= 96 for answer in together)


def test_a_neighbour_that_leaves_changes_nothing(server: Server, words: list[int], unharmed: None) -> None:
    """A shares B's beginning and is cancelled after each number of events."""
    first, second = words[:138], words[:128] + words[700:711]
    expected = sent(server, second, **fresh()).tokens
    for events in range(8):
        salt = fresh()
        leaves = Request(server, "chat", json.dumps(first), **(GREEDY | salt | {"max_tokens": 400}))
        stays = Request(server, "chat", json.dumps(second), **(GREEDY | salt))
        for _ in range(events):
            leaves.next()
        leaves.cancel()
        answer = stays.finish()
        answer.check_complete()
        assert answer.tokens == expected
        assert sent(server, second, **salt).tokens == expected


def test_more_prompts_than_pages(words: list[int]) -> None:
    """Pools as small as one context take in and give up cached pages all the time; answers stay the same."""
    engine = {"dtype": "float32", "threads": 2, "pool_tokens": MAX_CONTEXT}
    prompts = [words[n : n + 250] for n in range(0, 200, 10)]
    assert len(prompts) * 250 > 2 * MAX_CONTEXT
    salt = fresh()
    with Server(make_deployment(voice=None, prefill=engine, decode=engine)) as server, nothing_left_behind(server):
        # The first alone, so that its pages are the oldest; of those that come together, any may be.
        first = sent(server, prompts[0], **salt).tokens
        made = in_threads(4, lambda worker: [sent(server, ids, **salt).tokens for ids in prompts[1 + worker :: 4]])
        again = [sent(server, ids, **salt) for ids in prompts[:2]]
        assert [answer.tokens for answer in again] == [first, made[0][0]]
        assert cached(again[0]) == 0


def test_both_phases_count_what_they_found_and_the_gauges_add_up(server: Server, words: list[int]) -> None:
    def settled() -> Scrape:
        wait_idle(server)
        time.sleep(EXPORT_SECONDS)
        return Scrape(server)

    salt = fresh()
    sent(server, words[:200], **salt)
    before = settled()
    sent(server, words[:200], **salt)
    after = settled()
    for stage, part in (("prefill", server.deployment.prefill), ("decode", server.deployment.decode)):
        found = (page.value("tritone_cached_tokens_total", stage=stage) for page in (before, after))
        # In decode: pages that were not copied.
        assert -next(found) + next(found) == 192
        names = ("free", "cached", "used", "leased")
        states = {name: after.value("tritone_pages", stage=stage, state=name) for name in names}
        assert sum(states.values()) == part.pool_tokens // server.deployment.page_size
        assert states["cached"] >= 6
