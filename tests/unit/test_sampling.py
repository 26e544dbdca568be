"""Sampling against definitions worked out in numpy, and the promise that a row depends on itself alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tritone.engine.sampling import choose
from tritone.engine.sequence import Sequence
from tritone.errors import TritoneError
from tritone.messages import TokenInfo
from tritone.options import Sampling

VOCABULARY = 12
ROW = np.array([0.3, 2.1, -0.7, 1.9, 0.0, -3.0, 1.2, 2.0, 0.9, -1.1, 0.5, 1.0], np.float32)
ORDER = [1, 7, 3, 6, 11, 8, 10, 0, 4, 2, 9, 5]  # likeliest first


def sequence(
    sampling: Sampling, prompt: tuple[int, ...] = (1,), answer: tuple[int, ...] = (), logprobs: Any = None
) -> Sequence:
    made = Sequence(1, list(prompt), len(prompt), sampling, 100, logprobs=logprobs)
    for token in answer:
        made.append(token)
    return made


def tokens(rows: Any, sequences: list[Sequence]) -> list[int]:
    infos = choose(torch.tensor(np.asarray(rows, np.float32)), sequences)
    assert all(isinstance(info, TokenInfo) for info in infos)
    return [info.token for info in infos if isinstance(info, TokenInfo)]


def draws(sampling: Sampling, count: int, row: Any = ROW) -> list[int]:
    """The tokens of ``count`` different seeds."""
    sequences = [sequence(replace(sampling, seed=seed)) for seed in range(count)]
    return tokens(np.tile(row, (count, 1)), sequences)


def softmax(values: Any) -> Any:
    exponents = np.exp(np.asarray(values, np.float64) - np.max(values))
    return exponents / exponents.sum()


def assert_distribution(found: list[int], expected: Any) -> None:
    """Pearson's chi-square stays below mean + 4.5 standard deviations; nothing impossible is drawn."""
    counts = np.bincount(found, minlength=len(expected))
    possible = np.asarray(expected) > 0
    assert counts[~possible].sum() == 0
    wanted = np.asarray(expected)[possible] * len(found)
    statistic = float(((counts[possible] - wanted) ** 2 / wanted).sum())
    freedom = max(int(possible.sum()) - 1, 1)
    assert statistic < freedom + 4.5 * math.sqrt(2 * freedom), (counts, wanted)


def test_temperature_zero_takes_the_likeliest() -> None:
    rows = np.stack([ROW, ROW[::-1], -ROW])
    greedy = Sampling(temperature=0.0)
    assert tokens(rows, [sequence(greedy)] * 3) == [1, 10, 5]


def test_greedy_ignores_seed_and_the_sets() -> None:
    for seed in range(5):
        chosen = Sampling(temperature=0.0, top_k=3, top_p=0.5, min_p=0.5, seed=seed)
        assert tokens([ROW], [sequence(chosen)]) == [1]


def test_ties_go_to_the_lowest_id() -> None:
    row = np.zeros(VOCABULARY)
    row[[3, 8]] = 1.0
    assert tokens([row], [sequence(Sampling(temperature=0.0))]) == [3]
    assert set(draws(Sampling(temperature=1.0, top_k=1), 50, row)) == {3}
    assert set(draws(Sampling(temperature=1.0, top_k=2), 50, row)) == {3, 8}
    assert set(draws(Sampling(temperature=1.0, top_k=3), 60, np.zeros(5000))) == {0, 1, 2}


@pytest.mark.parametrize("top_k", [1, 2, 5, 11, 12, 13, 1_000_000])
def test_top_k(top_k: int) -> None:
    found = draws(Sampling(temperature=2.0, top_k=top_k), 1500)
    expected = np.zeros(VOCABULARY)
    kept = ORDER[:top_k]
    expected[kept] = softmax(ROW[kept] / 2)
    assert_distribution(found, expected)


def top_p_set(row: Any, temperature: float, top_p: float) -> list[int]:
    probabilities = softmax(row / temperature)
    kept, total = [], 0.0
    for token in ORDER:
        kept.append(token)
        total += probabilities[token]
        if total >= top_p:
            break
    return kept


@pytest.mark.parametrize(
    ("temperature", "top_p"), [(1.0, 0.01), (1.0, 0.3), (1.0, 0.6), (0.5, 0.6), (2.0, 0.95), (1.0, 0.9999)]
)
def test_top_p(temperature: float, top_p: float) -> None:
    found = draws(Sampling(temperature=temperature, top_p=top_p), 1500)
    expected = np.zeros(VOCABULARY)
    kept = top_p_set(ROW, temperature, top_p)
    expected[kept] = softmax(ROW[kept] / temperature)
    assert_distribution(found, expected)


@pytest.mark.parametrize(
    ("temperature", "min_p"), [(1.0, 1.0), (1.0, 0.7), (1.0, 0.2), (2.0, 0.2), (1.0, 0.0)]
)
def test_min_p(temperature: float, min_p: float) -> None:
    found = draws(Sampling(temperature=temperature, min_p=min_p), 1500)
    probabilities = softmax(ROW / temperature)
    expected = np.where(probabilities >= min_p * probabilities.max(), probabilities, 0)
    assert_distribution(found, expected / expected.sum())


def test_the_sets_together() -> None:
    sampling = Sampling(temperature=1.0, top_k=6, top_p=0.8, min_p=0.45)
    kept = ORDER[:6]
    probabilities = softmax(ROW[kept])
    before = np.cumsum(probabilities) - probabilities
    kept = [
        token
        for token, b, p in zip(kept, before, probabilities, strict=True)
        if b < 0.8 and p >= 0.45 * probabilities[0]
    ]
    expected = np.zeros(VOCABULARY)
    expected[kept] = softmax(ROW[kept])
    assert 2 <= len(kept) < 6
    assert_distribution(draws(sampling, 1500), expected)


@pytest.mark.parametrize("temperature", [0.25, 1.0, 2.0])
def test_temperature(temperature: float) -> None:
    assert_distribution(draws(Sampling(temperature=temperature), 3000), softmax(ROW / temperature))


def test_the_places_of_one_answer_are_independent_draws() -> None:
    made = sequence(Sampling(temperature=1.0, seed=4))
    found = []
    for _ in range(3000):
        found += tokens([ROW], [made])
        made.append(found[-1])
    assert_distribution(found, softmax(ROW))
    pairs = np.array(found[:-1]) * VOCABULARY + np.array(found[1:])
    expected = np.outer(softmax(ROW), softmax(ROW)).reshape(-1)
    common = expected > 0.005
    counts = np.bincount(pairs, minlength=VOCABULARY**2)[common]
    wanted = expected[common] * len(pairs)
    statistic = float(((counts - wanted) ** 2 / wanted).sum())
    assert statistic < common.sum() + 4.5 * math.sqrt(2 * common.sum())


@pytest.mark.parametrize("temperature", [1e-3, 1e-12, 1e-300, 5e-324])
def test_a_tiny_temperature_is_nearly_greedy(temperature: float) -> None:
    assert set(draws(Sampling(temperature=temperature), 20)) == {1}
    assert set(draws(Sampling(temperature=temperature, top_p=0.5, min_p=0.1), 20)) == {1}


def test_masked_tokens_are_never_drawn() -> None:
    row = ROW.copy()
    row[[1, 3, 7]] = -np.inf
    expected = np.where(np.isfinite(row), softmax(np.where(np.isfinite(row), row, -1e9)), 0)
    assert_distribution(draws(Sampling(temperature=1.0), 1500, row), expected)


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 - 1])
def test_same_seed_same_tokens_alone_and_in_any_batch(seed: int) -> None:
    random = np.random.default_rng(5)
    rows = random.normal(size=(20, VOCABULARY)).astype(np.float32)
    ours = Sampling(temperature=1.3, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.3, seed=seed)
    alone: list[int] = []
    answer: list[int] = []
    for row in rows:
        alone += tokens([row], [sequence(ours, (1, 2), tuple(answer))])
        answer.append(alone[-1])
    batched: list[int] = []
    for row in rows:
        width = int(random.integers(1, 16))
        place = int(random.integers(0, width))
        batch = random.normal(size=(width, VOCABULARY)).astype(np.float32)
        others = [
            sequence(Sampling(temperature=float(t), seed=int(t * 100))) for t in random.uniform(0, 2, width)
        ]
        batch[place], others[place] = row, sequence(ours, (1, 2), tuple(batched))
        batched.append(tokens(batch, others)[place])
    assert batched == alone
    assert len(set(alone)) > 1


def test_the_draw_depends_on_the_place_in_the_answer_not_on_the_prompt() -> None:
    sampling = Sampling(temperature=1.0, seed=9)
    for answer in ((), (3,), (3, 4, 5)):
        short = tokens([ROW], [sequence(sampling, (1,), answer)])
        long = tokens([ROW], [sequence(sampling, (1,) * 50, answer)])
        assert short == long


def test_different_seeds_differ() -> None:
    assert len(set(draws(Sampling(temperature=1.0), 30))) > 3


def penalised(sampling: Sampling, prompt: tuple[int, ...], answer: tuple[int, ...], row: Any = ROW) -> Any:
    values = row.astype(np.float64).copy()
    for token in set(prompt) | set(answer):
        penalty = sampling.repetition_penalty
        values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
    for token in set(answer):
        values[token] -= sampling.presence_penalty + sampling.frequency_penalty * answer.count(token)
    return values


PENALTIES = [
    Sampling(repetition_penalty=1.5),
    Sampling(repetition_penalty=0.5),
    Sampling(presence_penalty=1.0),
    Sampling(presence_penalty=-1.5),
    Sampling(frequency_penalty=0.6),
    Sampling(frequency_penalty=-0.4),
    Sampling(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25),
]
PROMPT, ANSWER = (1, 5, 1), (7, 3, 7, 7, 9)


@pytest.mark.parametrize("penalty", PENALTIES)
def test_penalties(penalty: Sampling) -> None:
    values = penalised(penalty, PROMPT, ANSWER)
    greedy = sequence(replace(penalty, temperature=0.0), PROMPT, ANSWER)
    assert tokens([ROW], [greedy]) == [int(values.argmax())]
    count = 2000
    sequences = [sequence(replace(penalty, seed=seed), PROMPT, ANSWER) for seed in range(count)]
    assert_distribution(tokens(np.tile(ROW, (count, 1)), sequences), softmax(values))


def test_the_answers_penalties_do_not_count_the_prompt() -> None:
    penalty = Sampling(temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0)
    assert tokens([ROW], [sequence(penalty, prompt=(1, 1, 1))]) == [1]
    assert tokens([ROW], [sequence(penalty, prompt=(1,), answer=(1,))]) == [7]


def test_penalties_do_not_leak_into_the_logits_of_others() -> None:
    rows = torch.tensor(np.tile(ROW, (2, 1)))
    before = rows.clone()
    heavy = sequence(Sampling(repetition_penalty=5.0, presence_penalty=2.0), PROMPT, ANSWER)
    choose(rows, [heavy, sequence(Sampling(temperature=0.0))])
    assert torch.equal(rows, before)


@pytest.mark.parametrize("bad", ["nan", "inf", "one nan", "all masked"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_fails_alone(bad: str, temperature: float) -> None:
    rows = np.tile(ROW, (3, 1))
    rows[1] = {"nan": np.nan, "inf": np.inf, "one nan": ROW, "all masked": -np.inf}[bad]
    if bad == "one nan":
        rows[1, 4] = np.nan
    sampling = Sampling(temperature=temperature, seed=3)
    expected = tokens([ROW], [sequence(sampling)])
    first, middle, last = choose(torch.tensor(rows), [sequence(sampling)] * 3)
    assert isinstance(middle, TritoneError)
    assert "not finite" in middle.message
    assert isinstance(first, TokenInfo) and isinstance(last, TokenInfo)
    assert [first.token, last.token] == expected * 2


@pytest.mark.parametrize("count", [0, 1, 5, 12])
@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.0), Sampling(temperature=0.5, repetition_penalty=2.0, seed=8)]
)
def test_logprobs_are_the_models_own(count: int, sampling: Sampling) -> None:
    (info,) = choose(torch.tensor(ROW[None]), [sequence(sampling, PROMPT, ANSWER, logprobs=count)])
    assert isinstance(info, TokenInfo) and info.logprob is not None
    expected = np.log(softmax(ROW))
    assert info.logprob == pytest.approx(expected[info.token], abs=1e-6)
    assert [token for token, _ in info.top] == ORDER[:count]
    assert [value for _, value in info.top] == pytest.approx(expected[ORDER[:count]], abs=1e-6)
    assert all(value <= 0 for value in [info.logprob, *(value for _, value in info.top)])


def test_a_certain_tokens_logprob_is_not_above_zero() -> None:
    row = np.full(VOCABULARY, -200.0)
    row[4] = 200.0
    (info,) = choose(
        torch.tensor(row[None], dtype=torch.float32), [sequence(Sampling(temperature=0.0), logprobs=2)]
    )
    assert isinstance(info, TokenInfo)
    assert info.logprob == 0
    assert info.top[1][1] == pytest.approx(-400)


def test_no_logprobs_unless_asked() -> None:
    (info,) = choose(torch.tensor(ROW[None]), [sequence(Sampling(temperature=0.0))])
    assert info == TokenInfo(1, None, ())


def test_an_empty_batch() -> None:
    assert choose(torch.zeros(1, VOCABULARY)[:0], []) == []
