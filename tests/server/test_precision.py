"""A precision for each phase: how near the answers stay with FP8 keys and values, position by position and served, and that
quantised weights serve what they compute."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.server.helpers import Scrape, ask, ask_together, fresh, wait_idle
from tests.server.reference import prose
from tests.server.serving import PAGE_SIZE, make_deployment
from tritone.deployment import Deployment
from tritone.kernels import QuantizedPages
from tritone.models.decoder import Batch, Decoder, key_offsets, load_decoder, load_kv_scales
from tritone.sizes import token_bytes
from tritone.supervisor import Server
from tritone.text.tokenizer import load_tokenizer

PROMPT, FORCED = 77, 512
POOL_BYTES = 200 << 20
LARGEST_KL, MEAN_KL, LARGEST_STEP, LARGEST_LEAD = 0.2, 0.01, 1.0, 1.0
QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "Write one sentence about the sea.",
    "How many days are in a week?",
    "What do bees make?",
    "Explain in two sentences why the sky is blue.",
    "Give me a recipe for pancakes.",
    "Tell me a short story about a dog.",
)


class Pages:
    """One sequence's pages of a kind, computed chunk by chunk or token by token."""

    def __init__(self, model: Decoder, count: int, dtype: torch.dtype, offsets: torch.Tensor | None = None) -> None:
        shape = (count, *model.config.page_shape(PAGE_SIZE))
        self.model, self.table = model, torch.arange(count, dtype=torch.int32)[None]
        if dtype == torch.float8_e4m3fn:
            codes = torch.zeros(shape, dtype=torch.uint8).view(dtype)
            self.kv: Any = QuantizedPages(codes, torch.ones(model.config.layers, 2, model.config.kv_heads), offsets)
        else:
            self.kv = torch.zeros(shape, dtype=dtype)

    def forward(self, tokens: list[int], begin: int) -> torch.Tensor:
        """Log-probabilities [tokens, vocabulary] after each of ``tokens``, which follow ``begin`` others."""
        count, end = len(tokens), begin + len(tokens)
        positions = torch.arange(begin, end, dtype=torch.int32)
        context = torch.tensor([end], dtype=torch.int32)
        hidden = self.model.forward(Batch(torch.tensor(tokens), positions, [0, count], context, self.table), self.kv)
        return self.model.logits(hidden).log_softmax(-1)


def offsets_of(model: Decoder, deployment: Deployment) -> torch.Tensor:
    """What decode's keys lack when its decoder is ``model``."""
    scales = load_kv_scales(deployment.checkpoint, model.config)
    assert torch.equal(scales.unique(), torch.ones(1))
    return key_offsets(model, load_tokenizer(Path(deployment.checkpoint)), scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_teacher_forced_decode_stays_near_one_shot_prefill(deployment: Deployment, tokenizer: Any, dtype: torch.dtype) -> None:
    model = load_decoder(deployment.checkpoint, dtype)
    offsets = offsets_of(model, deployment)
    ids = tokenizer.encode(prose(5, 60))[: PROMPT + FORCED]
    count = -(-len(ids) // PAGE_SIZE)
    assert len(ids) == PROMPT + FORCED
    expected = Pages(model, count, dtype).forward(ids, 0)[PROMPT - 1 :]
    prefill, decode = Pages(model, count, dtype), Pages(model, count, torch.float8_e4m3fn, offsets)
    prefill.forward(ids[:PROMPT], 0)
    pages = range(-(-PROMPT // PAGE_SIZE))
    assert model.kernels.convert_pages(prefill.kv, pages, decode.kv, pages, PROMPT) is None
    worst, total, step = 0.0, 0.0, 0.0
    for place in range(PROMPT, PROMPT + FORCED):
        found, wanted = decode.forward(ids[place : place + 1], place)[0], expected[place - PROMPT + 1]
        divergence = float((wanted.exp() * (wanted - found)).sum())
        worst, total = max(worst, divergence), total + divergence
        if place + 1 < len(ids):
            step = max(step, abs(float(found[ids[place + 1]] - wanted[ids[place + 1]])))
    print(f"KL mean {total / FORCED:.5f} largest {worst:.4f}; forced token's log-probability off by at most {step:.3f}")
    assert total / FORCED <= MEAN_KL and worst <= LARGEST_KL and step <= LARGEST_STEP


def stage(kv: str, weights: str = "bf16") -> dict[str, Any]:
    return {"dtype": "bfloat16", "weights": weights, "threads": 2, "kv": kv, "pool_bytes": POOL_BYTES, "max_batch_tokens": 256}


def test_the_same_bytes_hold_twice_the_tokens() -> None:
    both = make_deployment(voice=None, prefill=stage("bf16"), decode=stage("fp8"))
    assert both.decode.pool_tokens in (2 * both.prefill.pool_tokens, 2 * both.prefill.pool_tokens + PAGE_SIZE)


ANSWER, TOP = 48, 5


@pytest.fixture(scope="module")
def in_bf16(tokenizer: Any) -> list[tuple[list[int], list[dict[int, float]]]]:
    """For each question the answer of a decoder with BF16 weights, keys and values, alone: its tokens, and the likeliest
    ones at each place with their log-probabilities."""
    model, made = load_decoder(make_deployment(voice=None).checkpoint, torch.bfloat16), []
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        pages, given, tops = Pages(model, -(-(len(ids) + ANSWER) // PAGE_SIZE), torch.bfloat16), ids, []
        for place in range(ANSWER):
            best = pages.forward(given, 0 if place == 0 else len(ids) + place - 1)[-1].topk(TOP)
            tops.append(dict(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
            given = best.indices[:1].tolist()
            if given == [tokenizer.eos_token_id]:
                break
        made.append(([next(iter(top)) for top in tops], tops))
    return made


@pytest.fixture(scope="module")
def fp8_server() -> Iterator[Server]:
    with Server(make_deployment(voice=None, prefill=stage("bf16"), decode=stage("fp8"))) as server:
        yield server


def test_answers_are_sensible_and_part_from_bf16_only_where_it_hesitates(fp8_server: Server, in_bf16: Any) -> None:
    same, total, leads = 0, 0, []
    options = {"temperature": 0.0, "max_tokens": ANSWER, "logprobs": 0}
    found = ask_together(fp8_server, "chat", [(question, options) for question in QUESTIONS])
    for one, (tokens, tops) in zip(found, in_bf16, strict=True):
        one.check_complete()
        assert one.tokens[0] == tokens[0], "prefill makes the first token, in the same precision"
        pairs = zip(one.tokens, tokens, strict=False)
        agreed = next((place for place, (ours, theirs) in enumerate(pairs) if ours != theirs), len(tokens))
        same, total = same + agreed, total + len(tokens)
        if agreed < len(tokens):
            assert one.tokens[agreed] in tops[agreed], one.text
            leads.append(tops[agreed][tokens[agreed]] - tops[agreed][one.tokens[agreed]])
    print(f"greedy tokens before the first difference: {same} of {total}; bf16's leads there: {[round(x, 2) for x in leads]}")
    assert "Paris" in found[0].text and ("7" in found[3].text or "seven" in found[3].text)
    assert all(lead <= LARGEST_LEAD for lead in leads)


def test_the_first_answer_equals_the_hundredth(fp8_server: Server) -> None:
    """Every tenth is computed from its beginning, the others from cached pages."""
    options = {"temperature": 0.0, "max_tokens": 4, "logprobs": 0}
    salts = [fresh() for _ in range(10)]
    asked = [ask(fp8_server, "chat", QUESTIONS[5], **options, **salts[number // 10]) for number in range(100)]
    assert [bool(one.usage["cached_tokens"]) for one in asked] == 10 * [False, *9 * [True]]
    assert all(one.tokens == other.tokens for one, other in pairwise(asked))
    assert all(one.logprobs == other.logprobs for one, other in pairwise(asked))


def test_page_gauges_count_the_pages_of_each_pool(fp8_server: Server) -> None:
    wait_idle(fp8_server)
    pages = {name: Scrape(fp8_server).value("tritone_pages", stage=name) for name in ("prefill", "decode")}
    checkpoint = make_deployment(voice=None).checkpoint
    for name, kv in (("prefill", "bf16"), ("decode", "fp8")):
        assert pages[name] == POOL_BYTES // (PAGE_SIZE * token_bytes(Path(checkpoint), kv))


def test_quantised_weights_serve_what_they_compute() -> None:
    """FP8 weights in prefill, INT8 weights and FP8 pages in decode: every token is the likeliest of these decoders alone."""
    deployment = make_deployment(voice=None, prefill=stage("bf16", "fp8"), decode=stage("fp8", "int8"))
    prompts = [list(range(100 + 7 * seed, 100 + 7 * seed + length)) for seed, length in ((1, 5), (2, 70), (3, 33))]
    options = {"input_format": "token_ids", "temperature": 0.0, "max_tokens": 16, "logprobs": 0, "ignore_eos": True}
    with Server(deployment) as server:
        served = ask_together(server, "chat", [(json.dumps(prompt), options) for prompt in prompts])
    first, second = (load_decoder(deployment.checkpoint, weights=weights) for weights in ("fp8", "int8"))
    offsets = offsets_of(second, deployment)
    for prompt, answer in zip(prompts, served, strict=True):
        count = -(-(len(prompt) + 16) // PAGE_SIZE)
        prefill, decode = Pages(first, count, torch.bfloat16), Pages(second, count, torch.float8_e4m3fn, offsets)
        tokens = [*prompt, int(prefill.forward(prompt, 0)[-1].argmax())]
        pages = range(-(-len(prompt) // PAGE_SIZE))
        assert first.kernels.convert_pages(prefill.kv, pages, decode.kv, pages, len(prompt)) is None
        for place in range(len(prompt), len(prompt) + 15):
            tokens.append(int(decode.forward(tokens[place:], place)[-1].argmax()))
        assert answer.tokens == tokens[len(prompt) :]
