"""Figures of the evaluation against plain float64 numpy, and against what must come out."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from tritone.errors import TritoneError
from tritone.evaluation.bars import bars
from tritone.evaluation.bootstrap import estimate
from tritone.evaluation.precisions import Precision
from tritone.evaluation.reference import Reference
from tritone.evaluation.scoring import added, compare
from tritone.evaluation.tasks.choice import Choice
from tritone.evaluation.tasks.greedy import Greedy, divergence
from tritone.evaluation.tasks.likelihood import Document, Likelihood
from tritone.evaluation.tasks.tools import EXAMPLES, FUNCTIONS, REQUESTS, call_of, messages

VOCABULARY = 97


def distributions(seed: int, rows: int) -> tuple[Any, Any, Any]:
    draw = np.random.default_rng(seed)
    reference = draw.normal(0, 3, (rows, VOCABULARY))
    return reference + draw.normal(0, 0.7, reference.shape), reference, draw.integers(0, VOCABULARY, rows)


def test_scores_equal_float64() -> None:
    ours, theirs, targets = distributions(1, 40)
    got = compare(torch.tensor(ours).float(), torch.tensor(theirs).float(), torch.tensor(targets))
    p, q = (np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in (theirs, ours))
    assert got.tokens == 40
    assert got.nll == pytest.approx(-np.log(q[np.arange(40), targets]).sum(), rel=1e-5)
    assert got.kl == pytest.approx((p * np.log(p / q)).sum(), rel=1e-5)
    assert got.top1 == int((p.argmax(1) == q.argmax(1)).sum())
    shared = [len(set(np.argsort(a)[-5:]) & set(np.argsort(b)[-5:])) for a, b in zip(p, q, strict=True)]
    assert 0 < got.top1 < 40 and sum(shared) < 200
    assert got.top5 == pytest.approx(sum(shared) / 5)


def test_the_direction_of_the_divergence() -> None:
    """From the reference: what the reference thinks likely and the candidate does not counts."""
    reference, candidate = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.9, 0.1]]).log()
    wide = [torch.cat([one, torch.full((1, 6), -60.0)], 1) for one in (candidate, reference)]
    wanted = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    assert compare(*wide, torch.tensor([0])).kl == pytest.approx(wanted, rel=1e-5)


def test_parts_add_up_and_the_same_is_zero() -> None:
    ours, theirs, targets = (torch.tensor(part) for part in distributions(2, 30))
    whole = compare(ours, theirs, targets)
    parts = added([compare(ours[:11], theirs[:11], targets[:11]), compare(ours[11:], theirs[11:], targets[11:])])
    assert (parts.tokens, parts.top1) == (30, whole.top1)
    assert (parts.nll, parts.kl, parts.top5) == pytest.approx((whole.nll, whole.kl, whole.top5))
    same = compare(ours, ours, targets)
    assert (same.kl, same.top1, same.top5) == (0, 30, 30)


def test_logits_that_are_not_finite_are_an_error() -> None:
    ours, theirs, targets = (torch.tensor(part) for part in distributions(3, 4))
    ours[2, 5] = float("nan")
    with pytest.raises(TritoneError, match="not finite"):
        compare(ours, theirs, targets)


def test_intervals_are_those_of_the_mean() -> None:
    values = np.random.default_rng(4).normal(10, 2, 400)
    figure = estimate(lambda column: column.mean(-1), values, seed=0, name="x")
    half = 1.96 * values.std() / 20
    assert figure.value == pytest.approx(values.mean())
    assert (figure.low, figure.high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.1 * half)
    assert figure == estimate(lambda column: column.mean(-1), values, seed=0, name="x")
    assert figure != estimate(lambda column: column.mean(-1), values, seed=1, name="x")


def test_differences_are_paired() -> None:
    """Documents differ a lot, the candidate is worse by the same in each: the interval is narrow."""
    spread = np.random.default_rng(5).normal(100, 50, 30)
    figure = estimate(lambda a, b: (a - b).mean(-1), spread + 1, spread, seed=0, name="x")
    assert (figure.value, figure.low, figure.high) == pytest.approx((1, 1, 1))


def test_figures_of_running_text() -> None:
    task = Likelihood("text", "", [Document((1, 2, 3), 1)])
    reference = {"tokens": [10, 30], "nll": [20.0, 60.0], "kl": [0.0, 0.0], "top1": [10, 30], "top5": [10.0, 30.0]}
    raw = {"tokens": [10, 30], "nll": [22.0, 62.0], "kl": [1.0, 1.0], "top1": [5, 27], "top5": [8.0, 28.0]}
    figures = {name: figure.value for name, figure in task.figures(raw, reference, 0).items()}
    wanted = {
        "perplexity": math.exp(84 / 40),
        "perplexity_increase_percent": 100 * (math.exp(84 / 40) / math.exp(80 / 40) - 1),
        "log_likelihood": -2.1,
        "kl": 0.05,
        "top1": 0.8,
        "top5": 0.9,
    }
    assert figures == pytest.approx(wanted)


def test_a_tie_is_not_a_right_choice() -> None:
    task = Choice(lambda text: [1, 2], [], 0, 0)
    reference = {"scores": [[-1.0, -2.0, -3.0, -4.0], [-1.0, -2.0, -3.0, -4.0], [-9.0, -2.0, -3.0, -4.0]]}
    raw = {"scores": [[-1.0, -1.0, -3.0, -4.0], [-1.0, -2.0, -3.0, -4.0], [-9.0, -2.0, -3.0, -4.0]]}
    figures = {name: figure.value for name, figure in task.figures(raw, reference, 0).items()}
    assert figures == pytest.approx({"accuracy": 1 / 3, "accuracy_change": -1 / 3, "same_choice": 2 / 3})


def test_greedy_answers_until_they_differ() -> None:
    assert [divergence([1, 2, 3], other) for other in ([1, 2, 3], [1, 9, 3], [4], [], [1, 2])] == [3, 1, 0, 0, 2]
    task = Greedy("", [], 8, [])
    # The same to a stop token counts as the whole length, as does the whole length.
    reference = {"answers": [[1, 2, 0], [1] * 8, [1] * 8, [1] * 8]}
    raw = {"answers": [[1, 2, 0], [1] * 8, [1, 1, 5] + [1] * 5, [1] * 7 + [2]]}
    figures = {name: figure.value for name, figure in task.figures(raw, reference, 0).items()}
    wanted = {"median_tokens_until_different": 7.5, "mean_tokens_until_different": 25 / 4, "same_answer": 0.5}
    assert figures == pytest.approx(wanted)


ALARM = {"name": "set_alarm", "arguments": {"hour": 7, "minute": 30}}


@pytest.mark.parametrize(
    ("answer", "call"),
    [
        (json.dumps(ALARM), ALARM),
        ("<tool_call>\n" + json.dumps(ALARM) + "\n</tool_call> done", ALARM),
        ('{"name": "set_alarm", "arguments": {"hour": 7}}', None),
        ('{"name": "set_alarm", "arguments": {"hour": "7", "minute": 30}}', None),
        ('{"name": "set_alarm", "arguments": {"hour": true, "minute": 30}}', None),
        ('{"name": "set_alarm", "arguments": {"hour": 7, "minute": 30, "day": "Monday"}}', None),
        ('{"name": "set_alarm", "arguments": [7, 30]}', None),
        ('{"name": ["set_alarm"], "arguments": {"hour": 7, "minute": 30}}', None),
        ('{"name": "open_door", "arguments": {}}', None),
        ('{"name": "set_alarm", "arguments": {"hour": 7, "min', None),
        ("{" * 100_000, None),
        ("I will wake you at half past seven.", None),
        ("", None),
    ],
)
def test_what_is_a_call(answer: str, call: dict[str, Any] | None) -> None:
    assert call_of(answer) == call


def test_the_worked_examples_are_calls() -> None:
    assert {function["name"] for function in FUNCTIONS} == {call["name"] for _, call in EXAMPLES}
    assert all(call_of(message["content"]) for message in messages(REQUESTS[0]) if message["role"] == "assistant")


def test_bars_of_precisions() -> None:
    reference = {"nll": [100.0, 200.0], "tokens": [50, 100]}
    nll = {"bf16": 0.001, "bf16+kv-fp8": 0.004, "fp8": 0.02, "int4-g64": 0.3, "int4-g64-gptq": 0.1, "int4-g128-gptq": 0.1}
    task = Likelihood("text", "", [])
    rows = []
    for name, more in nll.items():
        raw = {
            "nll": [value + more * count for value, count in zip(reference["nll"], reference["tokens"], strict=True)],
            "tokens": [50, 100],
            "kl": [1.0, 2.0],
            "top1": [1, 1],
            "top5": [1.0, 1.0],
        }
        rows.append((Precision.parse(name), raw, task.figures(raw, reference, 0)))
    found = {(bar.precision, bar.unit): (bar.figure.value, bar.limit, bar.met) for bar in bars(rows, reference, 0)}
    assert set(found) == {("bf16+kv-fp8", "nats"), ("bf16+kv-fp8", "%"), ("fp8", "%"), ("int4-g64-gptq", "")}
    assert found["bf16+kv-fp8", "nats"] == (pytest.approx(0.02), 0.01, False)
    assert found["bf16+kv-fp8", "%"] == (pytest.approx(100 * math.expm1(0.004)), 0.5, True)
    assert found["fp8", "%"] == (pytest.approx(100 * math.expm1(0.02)), 1.5, False)
    share = math.expm1(0.1) / math.expm1(0.3)
    assert found["int4-g64-gptq", ""] == (pytest.approx(share), 0.5, True)


def test_hidden_states_of_another_key_are_not_taken(tmp_path: Any) -> None:
    rows = [torch.arange(6.0).reshape(2, 3), torch.ones(1, 3)]
    first = Reference(tmp_path, tmp_path, {"text": "a"})
    first.keep("text", rows)
    assert torch.equal(Reference(tmp_path, tmp_path, {"text": "a"}).rows("text", 0), rows[0])
    other = Reference(tmp_path, tmp_path, {"text": "b"})
    assert not other.has("text")
    other.keep("text", rows[:1])
    assert not first.has("text") and len(list(tmp_path.iterdir())) == 1
