"""The thinkers of both omni families in the engine, against transformers: text, sounds, images, both; alone and together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.omni_prompts import ANSWER, FAMILIES, MEDIA, Asked, answer, ask, checkpoint, decoder, expected, handed
from tritone.engine.engine import Engine
from tritone.engine.media import media_key
from tritone.engine.prefix_cache import PrefixCache
from tritone.engine.scheduler import Scheduler
from tritone.engine.sequence import Sequence
from tritone.kernels import default_kernels
from tritone.models.decoder import Decoder
from tritone.options import Sampling
from tritone.pools import BlockPool
from tritone.pools.pool import torch_view

PAGE = 16
BOUND, OTHER_EXPERT = 0.03, 0.5



@pytest.fixture
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for all modules, so that each checkpoint is made once."""
    return tmp_path_factory.getbasetemp() / "omni"


class Run:
    """An engine that keeps the logits its tokens are chosen from, by session."""

    def __init__(self, model: Decoder, directory: Path, *, budget: int = 512, pages: int = 64, cache: bool = False) -> None:
        directory.mkdir(exist_ok=True)
        pool = BlockPool(directory, "pages", pages, model.config.page_shape(PAGE), str(model.dtype)[6:], model.dtype.itemsize)
        kv: torch.Tensor = torch_view(pool.data, str(model.dtype)[6:], model.config.page_shape(PAGE))
        scheduler = Scheduler(pool, PAGE, 16, budget, cache=PrefixCache(pool, PAGE) if cache else None)
        handed = torch.zeros(pages, PAGE, model.config.hidden_size, dtype=model.dtype)
        self.model = model
        self.engine = Engine(model, kv, scheduler, handed)
        self.states: dict[int, list[torch.Tensor]] = {}
        self.rows: dict[int, torch.Tensor] = {}
        self.cached: dict[int, int] = {}
        self.preemptions = 0

    def sequence(self, session: int, asked: Asked) -> Sequence:
        media = None if asked.prompt is None else media_key(asked.prompt)
        return Sequence(
            session=session, tokens=asked.ids, prompt_length=len(asked.ids), sampling=Sampling(temperature=0.0),
            max_tokens=ANSWER, media=media, prompt=asked.prompt,
        )

    def answers(self, asked: list[Asked], length: int = ANSWER) -> list[list[int]]:
        sequences = [self.sequence(session, one) for session, one in enumerate(asked)]
        for one in sequences:
            self.engine.scheduler.add(one)
            self.states[one.session] = []
        while len(self.engine.scheduler):
            for output in self.engine.step():
                assert output.error is None and output.hidden is not None
                session = output.sequence.session
                self.states[session].append(output.hidden)
                if output.sequence.answer_length == length:
                    self.rows[session] = self.engine.handed_rows(output.sequence, output.sequence.computed)
                    self.cached[session] = output.sequence.cached
                    self.preemptions += output.sequence.preemptions
                    self.engine.scheduler.remove(output.sequence)
        return [one.tokens[one.prompt_length :] for one in sequences]

    def logits(self, session: int) -> torch.Tensor:
        return self.model.logits(torch.stack(self.states[session]))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", MEDIA)
def test_greedy_tokens_are_those_of_transformers(family: str, name: str, directory: Path, tmp_path: Path) -> None:
    asked, wanted = expected(family, directory)[name]
    run = Run(decoder(family, directory), tmp_path)
    assert run.answers([asked]) == [wanted.tokens]
    torch.testing.assert_close(run.logits(0), wanted.logits, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [512, 13])
def test_and_of_a_mixed_batch_cut_anywhere(family: str, budget: int, directory: Path, tmp_path: Path) -> None:
    """A budget of 13 tokens cuts the prompts inside their sounds and images."""
    every = list(expected(family, directory).values())
    run = Run(decoder(family, directory), tmp_path, budget=budget)
    assert run.answers([asked for asked, _ in every]) == [wanted.tokens for _, wanted in every]
    alone = Run(decoder(family, directory), tmp_path / "alone")
    for session, (asked, _) in enumerate(every):
        alone.answers([asked])
        if default_kernels().name != "torch":
            assert torch.equal(torch.stack(alone.states[0]), torch.stack(run.states[session]))
            assert torch.equal(alone.rows[0], run.rows[session])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_preempted_prompt_is_computed_again_with_its_media(family: str, directory: Path, tmp_path: Path) -> None:
    model = checkpoint(family, directory)[0]
    asked = [expected(family, directory)[name][0] for name in ("both", "image")]
    pages = [-(-(len(one.ids) + 40) // PAGE) for one in asked]
    run = Run(decoder(family, directory), tmp_path, pages=sum(pages) - 2)
    assert run.answers(asked, 40) == [answer(model, one, 40).tokens for one in asked]
    assert run.preemptions > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_logits_stay_within_their_bound(family: str, directory: Path, tmp_path: Path) -> None:
    """Root mean square of the difference, in deviations of the logits, as long as both have chosen the same tokens.

    Where two experts are nearly as good, rounding may choose the other one, and that token's logits differ much more.
    """
    for name, (asked, wanted) in expected(family, directory, torch.bfloat16).items():
        run = Run(decoder(family, directory, torch.bfloat16), tmp_path / name)
        tokens = run.answers([asked])[0]
        same = next((n for n, pair in enumerate(zip(tokens, wanted.tokens, strict=True)) if pair[0] != pair[1]), ANSWER - 1)
        error = (run.logits(0) - wanted.logits)[: same + 1].pow(2).mean(-1).sqrt() / wanted.logits.std()
        assert error.median() < BOUND, name
        assert error.max() < (OTHER_EXPERT if family == "qwen3" else BOUND), name


@pytest.mark.parametrize("family", FAMILIES)
def test_the_talker_is_handed_the_rows_of_transformers(family: str, directory: Path, tmp_path: Path) -> None:
    model = checkpoint(family, directory)[0]
    for name, (asked, wanted) in expected(family, directory).items():
        run = Run(decoder(family, directory), tmp_path / name, budget=13)
        run.answers([asked])
        torch.testing.assert_close(run.rows[0], handed(family, model, asked, wanted), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cached_beginning_changes_no_bit(family: str, directory: Path, tmp_path: Path) -> None:
    if default_kernels().name == "torch":
        pytest.skip("native kernels only")
    for name, (asked, _) in expected(family, directory).items():
        run = Run(decoder(family, directory), tmp_path / name, cache=True)
        cold, states = run.answers([asked]), torch.stack(run.states[0])
        rows = run.rows[0]
        assert run.cached[0] == 0
        assert run.answers([asked]) == cold
        assert run.cached[0] == (len(asked.ids) - 1) // PAGE * PAGE
        assert torch.equal(torch.stack(run.states[0]), states)
        assert torch.equal(run.rows[0], rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_other_media_share_only_what_comes_before_them(family: str, directory: Path, tmp_path: Path) -> None:
    model, tokenizer, _ = checkpoint(family, directory)
    first, other = (ask(model, tokenizer, seed, frames=(120,)) for seed in (1, 2))
    assert first.prompt is not None and other.prompt is not None
    assert other.ids == first.ids and other.prompt.digest != first.prompt.digest
    begins = int(first.prompt.places[0])
    assert begins >= PAGE, "there must be a page of text before the sound"
    run = Run(decoder(family, directory), tmp_path, cache=True)
    wanted = [answer(model, asked, ANSWER).tokens for asked in (first, other)]
    assert wanted[0] != wanted[1]
    assert run.answers([first]) == wanted[:1]
    assert run.answers([other]) == wanted[1:]
    assert run.cached[0] == begins // PAGE * PAGE
    text = Asked({"input_ids": first.inputs["input_ids"], "attention_mask": first.inputs["attention_mask"]}, None)
    run.answers([text])
    assert run.cached[0] == begins // PAGE * PAGE
