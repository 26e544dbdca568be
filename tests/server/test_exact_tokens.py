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


def greedy(length: int) -> dict[str, Any]:
    return {"input_format": "token_ids", "temperature": 0.0, "logprobs": 0, "max_tokens": new_tokens(length)}


@pytest.fixture(scope="module")
def alone(server: Server, prompts: dict[int, list[int]]) -> dict[int, list[int]]:
    """The server's answer to each prompt, asked for by itself."""
    made = {}
    for length, ids in prompts.items():
        answer = ask(server, "chat", json.dumps(ids), **greedy(length))
        answer.check_complete()
        assert answer.usage["prompt_tokens"] == length
        assert answer.usage["completion_tokens"] == len(answer.tokens)
        made[length] = answer.tokens
    return made


def test_the_prompts_are_what_they_should_be(prompts: dict[int, list[int]]) -> None:
    assert len(LENGTHS) == 20
    assert max(LENGTHS) + 16 <= MAX_CONTEXT
    assert all(len(ids) == length for length, ids in prompts.items())


def test_greedy_equals_transformers_alone(
    deployment: Any, tokenizer: Any, prompts: Any, alone: dict[int, list[int]]
) -> None:
    model, wrong = Reference(deployment.checkpoint), {}
    for length, ids in prompts.items():
        likeliest, lead = model.likeliest(ids, alone[length])
        assert lead > 1e-3, f"the answer to the prompt of {length} tokens hangs on rounding: choose another"
        ends = [place for place, token in enumerate(alone[length], 1) if token == tokenizer.eos_token_id]
        if likeliest != alone[length] or [*ends, new_tokens(length)][0] != len(alone[length]):
            wrong[length] = (alone[length], likeliest)
    assert not wrong


def test_greedy_equals_transformers_20_at_once(server: Server, prompts: Any, alone: dict[int, list[int]]) -> None:
    """Against the answers alone, which are those of transformers."""
    asked = [(json.dumps(ids), greedy(length)) for length, ids in prompts.items()]
    for length, answer in zip(prompts, ask_together(server, "chat", asked), strict=True):
        answer.check_complete()
        assert answer.end.kind == "end", answer.info
        assert answer.tokens == alone[length], length


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
