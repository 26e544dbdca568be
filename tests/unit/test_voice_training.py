"""Training the autoregressive Talker: rows, losses, resuming; and that generation sees what training saw."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from training.voice import answers as texts
from training.voice.batches import IGNORED, batches, collated, packed, positions
from training.voice.contexts import with_contexts
from training.voice.data import Answer, Clause, make_shard, read_shard, save_arrays
from training.voice.loss import inputs, losses
from training.voice.shards import Shards
from training.voice.spoken import Teacher
from training.voice.train import train
from training.voice.trainer import Plan, Trainer
from training.voice.unseen import UNSEEN
from tritone.models.codec.codec import ENTRIES, Codec
from tritone.models.decoder import Batch, load_decoder
from tritone.models.talker.config import END, READ, TalkerConfig
from tritone.models.talker.files import load_codec, load_network, save_talker
from tritone.models.talker.generate import speak
from tritone.models.talker.model import TalkerModel
from tritone.models.talker.text import ClauseText
from tritone.models.voice.prepare import prepare_voice
from tritone.models.voice.talker import HibariTalker

TINY = TalkerConfig(
    hidden_size=32, layers=2, heads=2, head_dim=16, intermediate_size=48, predictor_intermediate_size=32,
    text_layers=2, text_intermediate_size=32, text_taps=5, context_hidden=8, max_positions=200,
)  # fmt: skip
GAP = TINY.text_taps // 2
PLAN = Plan(rows=2, length=60, steps=12, warm_up=2)


def clause(draw: np.random.Generator, units: int, frames: int) -> Clause:
    ids = draw.integers(1, 170, units + 3)
    picks = np.sort(draw.choice(units + 3, units, replace=False))
    reads = np.sort(np.concatenate([[0], draw.integers(0, frames, units - 1)]))
    return Clause(ClauseText(ids, picks), reads, draw.integers(0, ENTRIES, (frames, 3)))


def some_answers(count: int, seed: int = 1) -> list[Answer]:
    draw = np.random.default_rng(seed)
    return [[clause(draw, draw.integers(2, 8), draw.integers(1, 9)) for _ in range(draw.integers(1, 3))] for _ in range(count)]


def model(seed: int = 0) -> TalkerModel:
    torch.manual_seed(seed)
    made = TalkerModel(TINY)
    for parameter in made.parameters():  # the slots too, which begin as zeros
        torch.nn.init.normal_(parameter, std=0.3)
    return made.eval()


def test_reads_and_frames_are_interleaved() -> None:
    one = Clause(
        ClauseText(np.array([4, 16, 5, 6]), np.array([0, 2, 3])),
        np.array([0, 2, 2]),
        np.array([[7, 1, 2], [8, 3, 4], [9, 5, 6]]),
    )
    batch = collated([[[one]]], 12, 1)
    # speaker, unit, two frames, two units, a frame, the end: what each place must give next.
    assert batch.targets.tolist() == [READ, 7, 8, READ, READ, 9, READ, END, *[IGNORED] * 4]
    assert batch.start_places.tolist() == [0] and batch.end_places.tolist() == [7]
    assert batch.unit_places.tolist() == [1, 4, 5] and batch.frame_places.tolist() == [2, 3, 6]
    assert batch.ids[0][batch.unit_ids].tolist() == [4, 5, 6]


def test_rows_hold_whole_answers_once() -> None:
    answers = some_answers(40)
    rows = packed([*answers, [], [clause(np.random.default_rng(0), 40, 40)]], 60)
    found = [id(answer) for row in rows for answer in row]
    assert sorted(found) == sorted(map(id, answers))
    assert all(sum(map(positions, row)) <= 60 for row in rows)
    assert sum(map(positions, answers)) / (60 * len(rows)) > 0.8


def test_batches_depend_on_their_seed_alone() -> None:
    answers = some_answers(30)
    first, again, other = (list(batches(answers, 2, 60, GAP, seed)) for seed in (1, 1, 2))
    assert all(torch.equal(a.targets, b.targets) and torch.equal(a.codes, b.codes) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0].targets, other[0].targets)


def test_neighbours_in_a_row_of_phonemes_do_not_see_each_other() -> None:
    network, (one, two) = model(), some_answers(2)
    alone = inputs(network, collated([[one]], 60, GAP), None)[0, : positions(one)]
    beside = inputs(network, collated([[two], [one]], 60, GAP), None)[1, : positions(one)]
    assert torch.allclose(alone, beside, atol=1e-5)


def test_generation_sees_what_training_saw() -> None:
    """The logits that an answer was chosen from step by step are those of the whole answer at once."""
    network, draw, seen = model(), torch.Generator().manual_seed(3), []
    answer = some_answers(4, seed=5)[3]
    answer = [
        replace(part, context=np.random.default_rng(8).random((len(part.reads), 8)).astype(np.float16)) for part in answer
    ]
    order: list[int] = []

    def choose(logits: torch.Tensor) -> int:
        seen.append(logits)
        if len(logits) == ENTRIES:
            return int(torch.multinomial(logits.softmax(-1), 1, generator=draw))
        units = sum(len(part.reads) for part in answer)
        token = READ if len(order) % 3 == 0 or len(order) > 4 * units else int(torch.randint(ENTRIES, (1,), generator=draw))
        order.append(token)
        return token

    contexts = [torch.from_numpy(part.context).float() for part in answer if part.context is not None]
    spoken = speak(network, [part.text for part in answer], contexts, choose=choose)
    reads, frames = [], 0
    for token in order:
        reads += [frames] if token == READ else []
        frames += token < ENTRIES
    made, start, unit = [], 0, 0
    for part, codes in zip(answer, spoken, strict=True):
        count = len(part.reads)
        made.append(replace(part, reads=np.array(reads[unit : unit + count]) - start, codes=codes))
        start, unit = start + len(codes), unit + count
    assert frames == sum(map(len, spoken)) > 5
    batch = collated([[made]], 200, GAP)
    with torch.no_grad():
        hidden = network.model(inputs(network, batch, None))[0]
        expected = network.lm_head(hidden)
        residual = network.residual_logits(hidden[batch.frame_places - 1], batch.codes)
    steps = [logits for logits in seen if len(logits) > ENTRIES]
    assert torch.allclose(torch.stack(steps), expected[: len(steps), :END], atol=1e-4)
    books = [logits for logits in seen if len(logits) == ENTRIES]
    assert torch.allclose(torch.stack(books[0::2]), residual[0], atol=1e-4)
    assert torch.allclose(torch.stack(books[1::2]), residual[1], atol=1e-4)


class FewShards(Shards):
    """Batches of made-up answers."""

    def __init__(self) -> None:
        self._answers = some_answers(150)

    def shard(self, index: int, contexts: bool = False) -> list[Answer]:
        return self._answers

    def batches(self, plan: Plan, gap: int) -> Iterator:  # type: ignore[type-arg]
        for number in range(100):
            yield from batches(self._answers, plan.rows, plan.length, gap, number)


def test_training_that_was_stopped_goes_on_to_the_bit(tmp_path: Path) -> None:
    train(FewShards(), PLAN, TINY, tmp_path / "whole.pt")
    stopped = Trainer(TINY, PLAN)
    for _, batch in zip(range(5), FewShards().batches(PLAN, GAP), strict=False):
        stopped.train(batch)
    stopped.save(tmp_path / "part.pt")
    train(FewShards(), PLAN, TINY, tmp_path / "part.pt")
    whole, part = (torch.load(tmp_path / name) for name in ("whole.pt", "part.pt"))
    assert whole["step"] == part["step"] == PLAN.steps
    for name in ("model", "averaged"):
        assert all(torch.equal(whole[name][key], part[name][key]) for key in whole[name])
    assert not torch.equal(whole["model"]["lm_head.weight"], whole["averaged"]["lm_head.weight"])


def test_a_tiny_model_learns_a_few_answers() -> None:
    trainer = Trainer(TINY, replace(PLAN, steps=60, rate=1e-2))
    batch = next(batches(some_answers(12), 2, 60, GAP, 0))
    before = losses(trainer.model, batch, None)
    for _ in range(60):
        trainer.train(batch)
    after = losses(trainer.model, batch, None)
    assert after[0] < 0.7 * before[0]


def test_contexts_are_those_of_their_units(tmp_path: Path) -> None:
    answers = some_answers(3)
    count = sum(len(part.reads) for answer in answers for part in answer)
    units = np.arange(count, dtype=np.int32) % 5 - 1
    hidden = np.arange(4, dtype=np.float16)[:, None].repeat(8, 1) + 1
    save_arrays({"hidden": hidden, "units": units}, tmp_path / "contexts.safetensors")
    found = with_contexts([answers[0], [], *answers[1:]], tmp_path / "contexts.safetensors")
    values = np.concatenate([part.context[:, 0] for answer in found for part in answer if part.context is not None])
    assert found[1] == [] and np.array_equal(values, units + 1)  # 0 where none is known
    shown = [batch.contexts for batch in batches(found, 1, 60, GAP, 0) if batch.contexts is not None]
    assert shown and all(part.shape[1] == 8 for part in shown)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Teacher:
    return Teacher(HibariTalker(prepare_voice(tmp_path_factory.mktemp("voices") / "heart")))


def test_a_shard_is_the_same_twice_and_comes_back(teacher: Teacher, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    books = draw.standard_normal((ENTRIES, 512)), draw.standard_normal((2, ENTRIES, 12))
    codec = Codec(*(book.astype(np.float32) for book in books))
    answers = ["Hello there. How are you today, my friend?", "...", "It costs $5."]
    for name in ("one", "two"):
        make_shard(teacher, codec, answers, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    first, nothing, last = read_shard(tmp_path / "one")
    assert len(first) == len(texts.clauses(answers[0])) == 2 and nothing == [] and len(last) == 1
    for part, text in zip(first, texts.clauses(answers[0]), strict=True):
        made = teacher.speak(text)
        assert made is not None and np.array_equal(part.codes, codec.encode(made.frames))
        assert np.array_equal(part.reads, made.reads) and np.array_equal(part.text.ids, made.text.ids)
        assert part.reads[0] == 0 and np.all(np.diff(part.reads) >= 0) and part.reads[-1] <= len(part.codes)


def test_what_is_judged_is_not_trained_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    held_back = ("Dinner is ready.", "one two three four five")
    assert "dinner is ready." in UNSEEN
    monkeypatch.setattr(
        texts.sources, "wordnet", lambda cache: (["Dinner is ready.", "A dog barks."], ["A thing that is."] * 12_000)
    )
    monkeypatch.setattr(texts.sources, "questions", lambda: ["How many?"])
    made = texts.answers(tmp_path, frozenset(text.lower() for text in held_back))
    assert made == texts.answers(tmp_path, frozenset(text.lower() for text in held_back))
    joined = " ".join(made)
    assert "A dog barks." in joined and not any(text in joined for text in held_back[:1])
    assert max(len(answer.split()) for answer in made) <= texts.LONGEST


def test_a_saved_network_speaks_as_the_rounded_one(tmp_path: Path) -> None:
    network, draw = model(), np.random.default_rng(0)
    codec = Codec(draw.random((ENTRIES, 512), np.float32), draw.random((2, ENTRIES, 12), np.float32))
    save_talker(tmp_path, network, codec, {"program": "a test"})
    loaded = load_network(tmp_path)
    assert loaded.config == TINY
    for name, value in network.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value.to(torch.bfloat16).float())
    assert np.array_equal(load_codec(tmp_path).text, codec.text.astype(np.float16))
    digests = json.loads((tmp_path / "voice.json").read_text())["files"]
    assert set(digests) == {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")} - {"voice.json"}
    assert all(hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() == digest for name, digest in digests.items())


def test_the_decoders_are_checkpoints_for_the_paged_decoder(tmp_path: Path) -> None:
    """What the reference's decoder gives is what the serving decoder gives over pages."""
    network = model()
    for parameter in network.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).float()
    zeros = Codec(np.zeros((ENTRIES, 512), np.float32), np.zeros((2, ENTRIES, 12), np.float32))
    save_talker(tmp_path, network, zeros, {})
    rows = torch.randn(9, 32, generator=torch.Generator().manual_seed(1))
    for part, stack in (("talker", network.model), ("code_predictor", network.code_predictor.model)):
        decoder = load_decoder(tmp_path / part, torch.float32, max_positions=64)
        pages = torch.zeros(1, *decoder.config.page_shape(16))
        batch = Batch(
            torch.zeros(9, dtype=torch.int64), torch.arange(9, dtype=torch.int32), [0, 9],
            torch.tensor([9], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32),
        )  # fmt: skip
        with torch.inference_mode():
            assert torch.allclose(decoder.forward(batch, pages, rows), stack(rows[None])[0], atol=1e-4)
