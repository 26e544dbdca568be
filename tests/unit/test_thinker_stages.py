"""Thinkers through prefill, integrity and decode: the answers, what the Talker is handed, and what the caches change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.omni_prompts import ANSWER, FAMILIES, MEDIA, Asked, answer, ask, checkpoint, decoder, expected, handed
from tests.unit.cascade import ThroughIntegrity, tokens_of
from tests.unit.helpers import FakeReply, request, wait_until
from tritone.deployment import Deployment
from tritone.engine.engine import Engine
from tritone.engine.prefix_cache import PrefixCache
from tritone.engine.scheduler import Scheduler
from tritone.integrity import Ledger
from tritone.integrity.tracker import Tracker
from tritone.messages import Event
from tritone.metrics import Metrics
from tritone.options import Sampling
from tritone.pools import BlockPool, CancelBoard, Views
from tritone.pools.pool import torch_view
from tritone.sizes import HIDDEN_ROWS
from tritone.stages.decode import DecodeStage
from tritone.stages.hidden import answer_rows
from tritone.stages.integrity import IntegrityStage
from tritone.stages.prefill import PrefillStage
from tritone.text.detokenizer import Detokenizer
from tritone.text.tokenizer import load_tokenizer

PAGE = 16
HIDDEN_BLOCKS = 80


class Stages:
    """Both engines of one thinker, with pools of pages and of the Talker's rows (those of a checkpoint with no ``talker``
    are the states that tokens were chosen from)."""

    def __init__(
        self,
        family: str,
        weights: Path,
        directory: Path,
        *,
        lease: float = 60.0,
        pages: int = 96,
        talker: bool = True,
    ) -> None:
        self.directory = directory
        self.model = decoder(family, weights)
        self.pools: list[BlockPool] = []
        engine = {"kv": "float32", "pool_tokens": 64 * PAGE}
        values = {"mode": "raise", "checksum": True, "audit_seconds": 0.2}
        sizes = {"page_size": PAGE, "max_context": 512, "prefill": engine, "decode": engine}
        self.deployment = Deployment.parse({"voice": None, **sizes, "integrity": values}, "t")
        board = CancelBoard(directory)
        rows = answer_rows(self.model) if talker else None
        self.prefill = PrefillStage(
            self._engine("prefill", 64, keep=talker), self.pools[0], self._rows("prefill"), board, Metrics("prefill"),
            max_queue=64, lease_seconds=lease, checksum=True, rows=rows,
        )
        self.decode = DecodeStage(
            self._engine("decode", pages, keep=False), load_tokenizer(checkpoint(family, weights)[2]), self.pools[2],
            self._rows("decode"), Views(directory), board, Metrics("decode"), max_queue=64, lease_seconds=lease, rows=rows,
        )
        self.integrity = IntegrityStage(self.deployment, directory, board, Metrics("integrity"))
        self.views = Views(directory)

    def _engine(self, name: str, pages: int, keep: bool) -> Engine:
        ledger = Ledger(self.directory, f"{name}_pages", owner=True)
        shape = self.model.config.page_shape(PAGE)
        pool = BlockPool(self.directory, f"{name}_pages", pages, shape, "float32", 4, seal=True)
        self.pools.append(pool)
        cache = PrefixCache(pool, PAGE, mixed=True)
        scheduler = Scheduler(pool, PAGE, 16, 48, cache=cache, tracker=Tracker(pool, ledger, log_only=False))
        rows = torch.zeros(pages, PAGE, self.model.config.hidden_size) if keep else None
        return Engine(self.model, torch_view(pool.data, "float32", shape), scheduler, rows)

    def _rows(self, name: str) -> BlockPool:
        shape = (HIDDEN_ROWS, self.model.config.hidden_size)
        self.pools.append(BlockPool(self.directory, f"{name}_hidden", HIDDEN_BLOCKS, shape, "float32", 4))
        return self.pools[-1]

    def submit(
        self, session: int, asked: Asked, tokens: int = ANSWER, speech: bool = True, stop: tuple[str, ...] = ()
    ) -> FakeReply:
        reply = FakeReply()
        greedy = Sampling(temperature=0.0)
        given = request(
            session, tuple(asked.ids), sampling=greedy, max_tokens=tokens, logprobs=0, speech=speech, stop=stop
        )
        self.prefill.submit(given, ThroughIntegrity(self.integrity, self.decode, reply), asked.prompt)
        return reply

    def rows(self, events: list[Event]) -> torch.Tensor:
        """What a Talker reads: all rows in their order. It gives the blocks back."""
        found = []
        for event in events:
            assert len(event.hidden) == len(event.rows)
            for refs, count in zip(event.hidden, event.rows, strict=True):
                held: torch.Tensor = torch_view(self.views.of(refs).data, refs.dtype, refs.shape)
                found.append(held[list(refs.blocks)].flatten(0, 1)[:count].clone())
                self.views.release(refs)
        return torch.cat(found)

    def stop(self) -> None:
        for stage in (self.prefill, self.decode, self.integrity):
            stage.stop()


@pytest.fixture
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for all modules, so that each checkpoint is made once."""
    return tmp_path_factory.getbasetemp() / "omni"


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def stages(family: str, directory: Path, tmp_path: Path) -> Iterator[Stages]:
    made = Stages(family, directory, tmp_path)
    yield made
    made.stop()


def answered(reply: FakeReply) -> list[Event]:
    events: list[Event] = reply.wait(20)
    assert events[-1].kind == "end", events[-1]
    return events


def test_answers_and_rows_are_those_of_transformers(family: str, directory: Path, stages: Stages) -> None:
    """All four at once: one batch of different lengths, prompts in chunks."""
    every = expected(family, directory)
    replies = [stages.submit(1 + n, asked) for n, (asked, _) in enumerate(every.values())]
    for reply, (name, (asked, wanted)) in zip(replies, every.items(), strict=True):
        events = answered(reply)
        assert tokens_of(events) == wanted.tokens, name
        rows = stages.rows(events)
        given = handed(family, checkpoint(family, directory)[0], asked, wanted)
        if family == "qwen3":
            # The last token's embedding too, which transformers, taking in one token less, has not.
            last = stages.model.embed(torch.tensor(wanted.tokens[-1:]))
            given = torch.cat((given, last))
        torch.testing.assert_close(rows, given, rtol=2e-4, atol=2e-4)
    wait_until(lambda: all(pool.leases == 0 for pool in stages.pools))


def test_a_warm_answer_is_a_cold_one(family: str, directory: Path, stages: Stages) -> None:
    for session, (name, (asked, wanted)) in enumerate(expected(family, directory).items()):
        found = []
        for number in (1, 2, 3):
            events = answered(stages.submit(10 * session + number, asked))
            cached = events[-1].info["usage"]["cached_tokens"]
            assert number == 1 or cached == (len(asked.ids) - 1) // PAGE * PAGE, name
            assert tokens_of(events) == wanted.tokens
            found.append(stages.rows(events))
        assert all(torch.equal(rows, found[0]) for rows in found[1:]), name


def test_a_cold_and_a_warm_answer_with_the_system_prompt_of_another(family: str, directory: Path, stages: Stages) -> None:
    """The pages of a prompt of text serve one with media, up to the first medium and not further."""
    model, tokenizer, _ = checkpoint(family, directory)
    first, other = (ask(model, tokenizer, seed, **MEDIA["sound"]) for seed in (1, 2))
    text = Asked({name: first.inputs[name] for name in ("input_ids", "attention_mask")}, None)
    assert first.ids == other.ids == text.ids and first.prompt is not None
    before = int(first.prompt.places[0]) // PAGE * PAGE
    found = []
    for session, asked in enumerate((text, first, other, text, first, other)):
        events = answered(stages.submit(1 + session, asked))
        cached = events[-1].info["usage"]["cached_tokens"]
        assert cached == (0 if session == 0 else before if session < 3 else (len(first.ids) - 1) // PAGE * PAGE)
        found.append((tokens_of(events), stages.rows(events)))
    assert [tokens for tokens, _ in found[1:3]] == [answer(model, asked, ANSWER).tokens for asked in (first, other)]
    for cold, warm in zip(found[:3], found[3:], strict=True):
        assert cold[0] == warm[0] and torch.equal(cold[1], warm[1])
    assert found[0][0] != found[1][0] != found[2][0]


def test_without_a_talker_of_its_own_the_rows_are_states(family: str, directory: Path, tmp_path: Path) -> None:
    stages = Stages(family, directory, tmp_path, talker=False)
    try:
        asked, wanted = expected(family, directory)["sound"]
        events = answered(stages.submit(1, asked))
        assert tokens_of(events) == wanted.tokens
        states = torch.stack([step[-1][0, -1] for step in wanted.states])
        torch.testing.assert_close(stages.rows(events), states, rtol=2e-4, atol=2e-4)
    finally:
        stages.stop()


def test_a_stop_string_is_not_spoken(family: str, directory: Path, stages: Stages) -> None:
    """Rows leave with the text of their tokens: none of a token whose text lies in the stop string."""
    tried = 0
    for name, (asked, wanted) in expected(family, directory).items():
        detokenizer = Detokenizer(load_tokenizer(checkpoint(family, directory)[2]))
        pieces = [detokenizer.push(token) for token in wanted.tokens]
        text = "".join(pieces)
        whole = stages.rows(answered(stages.submit(100 + tried, asked)))
        for number in range(ANSWER - 1):
            # From the last character of one token to the first of the next.
            begins = len("".join(pieces[: number + 1])) - 1
            stop = text[begins : begins + 2]
            if not pieces[number] or not pieces[number + 1] or text.find(stop) != begins or "\ufffd" in stop:
                continue
            tried += 1
            events = answered(stages.submit(tried, asked, stop=(stop,)))
            assert "".join(event.text for event in events) == text[:begins]
            spoken = sum(len("".join(pieces[:n])) < begins for n in range(len(pieces)))
            assert torch.equal(stages.rows(events), whole[: len(asked.ids) + spoken]), (name, number)
    assert tried >= 3


def test_media_that_make_nan_end_their_own_request_alone(family: str, directory: Path, stages: Stages) -> None:
    every = expected(family, directory)
    asked, wanted = every["both"]
    assert asked.prompt is not None
    broken = replace(asked.prompt, embeddings=asked.prompt.embeddings.clone(), digest=b"broken")
    broken.embeddings[3] = torch.nan
    replies = [stages.submit(1, Asked(asked.inputs, broken)), stages.submit(2, asked), stages.submit(3, every["image"][0])]
    last = replies[0].wait(20)[-1]
    assert (last.kind, last.info["message"]) == ("error", "the model's logits are not finite")
    assert [tokens_of(answered(reply)) for reply in replies[1:]] == [wanted.tokens, every["image"][1].tokens]


def test_media_that_do_not_fit_are_refused(family: str, directory: Path, stages: Stages) -> None:
    asked = expected(family, directory)["both"][0]
    assert asked.prompt is not None
    last = stages.submit(1, Asked(asked.inputs, replace(asked.prompt, delta=1))).wait()[-1]
    assert (last.kind, last.info["code"]) == ("error", "INVALID_ARGUMENT") and "delta: 1" in last.info["message"]


def test_a_preempted_answer_goes_on(family: str, directory: Path, tmp_path: Path) -> None:
    every = expected(family, directory)
    length = 60
    stages = Stages(family, directory, tmp_path, pages=14)
    try:
        asked = [every[name][0] for name in ("image", "both")]
        replies = [stages.submit(1 + n, one, length, speech=False) for n, one in enumerate(asked)]
        wanted = [answer(checkpoint(family, directory)[0], one, length).tokens for one in asked]
        assert [tokens_of(answered(reply)) for reply in replies] == wanted
        assert "tritone_preemptions_total" in {key[0] for key in stages.decode._metrics.drain()[0]}
    finally:
        stages.stop()


def test_a_prompt_with_media_is_not_computed_without_them(family: str, directory: Path, tmp_path: Path) -> None:
    """A request whose lease is nearly over is computed by decode, if it is text; media are not there."""
    stages = Stages(family, directory, tmp_path, lease=0.5)
    try:
        stages.decode._scheduler.max_sequences = 0
        text, image = (stages.submit(1 + n, expected(family, directory)[name][0]) for n, name in enumerate(("text", "image")))
        last = image.wait()[-1]
        assert (last.kind, last.info["code"]) == ("error", "UNAVAILABLE")
        assert "media" in last.info["message"] and not text.closed
        stages.decode._scheduler.max_sequences = 16
        assert tokens_of(answered(text)) == expected(family, directory)["text"][1].tokens
        wait_until(lambda: stages.pools[0].leases == 0)
    finally:
        stages.stop()
