"""Tokens: greedy ones equal transformers', seeds decide the others, neighbours change nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.helpers import Answer, ask, ask_together
from tests.server.reference import Reference, prose
from tests.server.serving import CHUNK, MAX_CONTEXT, PAGE_SIZE
from tritone.supervisor import Server

# The reference is slow where others use the machine too.
pytestmark = pytest.mark.timeout(900)

BORDERS = (PAGE_SIZE, 2 * PAGE_SIZE, CHUNK, 2 * CHUNK)
LENGTHS = (1, 2, 5, 17, 100, 200, 1000, 2000, *(border + step for border in BORDERS for step in (-1, 0, 1)))
FREE = {"temperature": 0.8, "max_tokens": 12, "logprobs": 0}


def new_tokens(length: int) -> int:
    return 16 if length <= 600 else 8


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> dict[int, list[int]]:
    """A prompt for each length, no two with a common beginning."""
    return {length: tokenizer.encode(prose(length, 2 + length // 14))[:length] for length in LENGTHS}


@pytest.fixture(scope="module")
def reference(deployment: Any, prompts: dict[int, list[int]]) -> dict[int, list[int]]:
    model = Reference(deployment.checkpoint)
    made = {length: model.generate(ids, new_tokens(length)) for length, ids in prompts.items()}
    close = {length: answer.margin for length, answer in made.items() if answer.margin < 1e-3}
    assert not close, f"prompts whose answer hangs on rounding, choose others: {close}"
    return {length: answer.tokens for length, answer in made.items()}


def greedy(length: int) -> dict[str, Any]:
    return {"input_format": "token_ids", "temperature": 0.0, "logprobs": 0, "max_tokens": new_tokens(length)}


def test_the_prompts_are_what_they_should_be(prompts: dict[int, list[int]]) -> None:
    assert len(LENGTHS) == 20
    assert max(LENGTHS) + 16 <= MAX_CONTEXT
    assert all(len(ids) == length for length, ids in prompts.items())


def test_greedy_equals_transformers_alone(server: Server, prompts: Any, reference: Any) -> None:
    wrong = {}
    for length, ids in prompts.items():
        answer = ask(server, "chat", json.dumps(ids), **greedy(length))
        answer.check_complete()
        assert answer.usage["prompt_tokens"] == length
        assert answer.usage["completion_tokens"] == len(answer.tokens)
        if answer.tokens != reference[length]:
            wrong[length] = (answer.tokens, reference[length])
    assert not wrong


def test_greedy_equals_transformers_20_at_once(server: Server, prompts: Any, reference: Any) -> None:
    answers = ask_together(
        server, "chat", [(json.dumps(ids), greedy(length)) for length, ids in prompts.items()]
    )
    wrong = {
        length: (answer.tokens, reference[length])
        for length, answer in zip(prompts, answers, strict=True)
        if answer.tokens != reference[length]
    }
    assert not wrong
    for answer in answers:
        answer.check_complete()


def question(number: int) -> str:
    return f"Tell me about the number {number}."


def sampled(server: Server, seed: int, **options: Any) -> Answer:
    return ask(server, "chat", question(7), seed=seed, **(FREE | options))


def test_same_seed_same_tokens_alone_and_beside_15_others(server: Server) -> None:
    alone = sampled(server, 1234)
    assert len(alone.tokens) == FREE["max_tokens"]
    others = [
        (question(n), FREE | {"seed": n, "temperature": 0.5 + n / 10, "max_tokens": 8 + n}) for n in range(15)
    ]
    together = ask_together(server, "chat", [*others[:9], (question(7), FREE | {"seed": 1234}), *others[9:]])
    assert together[9].tokens == alone.tokens
    assert together[9].logprobs == alone.logprobs or _close(together[9], alone)


def _close(one: Answer, other: Answer) -> bool:
    """A batch may round the last bits of a log-probability otherwise; never the choice."""
    return all(
        abs(a["logprob"] - b["logprob"]) < 1e-3 for a, b in zip(one.logprobs, other.logprobs, strict=True)
    )


def test_different_seeds_differ_and_temperature_0_needs_none(server: Server) -> None:
    assert len({tuple(sampled(server, seed).tokens) for seed in range(4)}) == 4
    assert len({tuple(sampled(server, seed, temperature=0.0).tokens) for seed in range(3)}) == 1


def test_without_a_seed_each_answer_has_its_own(server: Server) -> None:
    # So hot that two draws with different seeds do not meet by chance in 32 tokens.
    hot = FREE | {"temperature": 2.0, "max_tokens": 32, "ignore_eos": True}
    assert len({tuple(ask(server, "chat", question(7), **hot).tokens) for _ in range(3)}) == 3


def test_sampling_limits_narrow_to_the_greedy_answer(server: Server) -> None:
    expected = sampled(server, 1, temperature=0.0).tokens
    assert sampled(server, 5, temperature=1.5, top_k=1).tokens == expected
    assert sampled(server, 5, temperature=1.5, top_p=1e-6).tokens == expected
    assert sampled(server, 5, temperature=1.5, min_p=1.0).tokens == expected


def test_penalties_change_the_answer(server: Server) -> None:
    options = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
    plain = sampled(server, 1, **options).tokens
    for penalty in ({"repetition_penalty": 1.5}, {"frequency_penalty": 2.0}, {"presence_penalty": 2.0}):
        answer = sampled(server, 1, **options, **penalty).tokens
        assert answer != plain
        assert len(set(answer)) >= len(set(plain)), penalty
