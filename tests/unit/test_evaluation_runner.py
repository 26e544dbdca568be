"""The runner against transformers, and against itself cut otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.unit import test_quantization_models as tiny
from tritone.evaluation import runner as module
from tritone.evaluation.runner import Runner
from tritone.models.decoder import load_decoder

IDS = [int(value) for value in (torch.arange(150) * 7919) % 330]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("tiny"), max_position_embeddings=512)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def runner(checkpoint: Path) -> Runner:
    return Runner(load_decoder(checkpoint, torch.float32), torch.float32)


def logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return found


@pytest.mark.parametrize("chunk", [512, 40])
def test_text_is_predicted_as_by_transformers(runner: Runner, model: Any, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", chunk)
    got = runner.decoder.logits(runner.hidden(IDS, 20))
    assert got.shape[0] == len(IDS) - 20
    torch.testing.assert_close(got, logits(model, IDS)[19:-1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("length", [1, 31, 32, 33, 100])
def test_options_share_the_context(runner: Runner, model: Any, length: int) -> None:
    context, options = IDS[:length], [IDS[100:101], IDS[90:95], IDS[60:130], IDS[110:112]]
    for option, rows in zip(options, runner.options(context, options), strict=True):
        wanted = logits(model, context + option)[length - 1 : -1]
        torch.testing.assert_close(runner.decoder.logits(rows), wanted, rtol=1e-3, atol=1e-3)


def test_greedy_answers_are_those_of_transformers(runner: Runner, model: Any) -> None:
    prompts = [IDS[:5], IDS[40:140], IDS[3:36], IDS[40:141]]
    wanted = []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(12):
            tokens.append(int(logits(model, tokens)[-1].argmax()))
        wanted.append(tokens[len(prompt) :])
    done: list[int] = []
    assert runner.greedy(prompts, 12, [], done.append) == wanted
    assert done[-1] == len(prompts)
    stop = wanted[1][4]
    ended = runner.greedy(prompts, 12, [stop], done.append)
    assert ended == [answer[: answer.index(stop) + 1] if stop in answer else answer for answer in wanted]


def test_one_pass_sees_e4m3_pages_as_decode_does(checkpoint: Path) -> None:
    """A token's result is the same to the bit whether its predecessors came one by one or in a chunk."""
    decoder = load_decoder(checkpoint, torch.bfloat16)
    one = Runner(decoder, torch.bfloat16, torch.ones(3, 2, 2))
    whole = one.hidden(IDS[:70], 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", 1)
        steps = Runner(decoder, torch.bfloat16, torch.ones(3, 2, 2)).hidden(IDS[:70], 1)
    assert torch.equal(whole, steps)
    assert not torch.equal(whole, Runner(decoder, torch.bfloat16).hidden(IDS[:70], 1))
