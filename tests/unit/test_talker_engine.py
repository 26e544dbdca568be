"""The Talkers of both omni families in their engine, against transformers: alone, together, and fed in any pieces."""

from __future__ import annotations

import functools
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.omni_prompts import ask
from tests.talker_reference import SPEAKER, Reference, Speech, ask_text
from tritone.engine.scheduler import Scheduler
from tritone.engine.talker import Spoken, TalkerEngine, TalkerSequence
from tritone.errors import InvalidArgument
from tritone.models.omni.heard import Heard
from tritone.models.omni.talker_config import hearer_of, speech_defaults, voices_of
from tritone.models.omni.talker_loading import OmniTalker, load_talker
from tritone.options import Sampling
from tritone.pools import BlockPool
from tritone.pools.pool import torch_view
from tritone.stages.saved import saver

PAGE = 16
WORDS, FRAMES = 7, 30
GREEDY = Sampling(temperature=0.0, repetition_penalty=1.05)
MEDIA: dict[str, dict[str, Any]] = {
    "text": {},
    "sound": {"frames": (120,)},
    "image": {"grids": ((4, 6),)},
    "both": {"frames": (120, 33), "grids": ((4, 6), (8, 4))},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("talkers")


@pytest.fixture(params=["qwen3", "qwen2.5"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@functools.cache
def reference(family: str, directory: Path) -> Reference:
    return Reference(family, directory / family)


@functools.cache
def spoken(family: str, directory: Path) -> dict[str, Speech]:
    made = reference(family, directory)
    asked = {name: ask(made.model, made.tokenizer, seed, seed, **media) for seed, (name, media) in enumerate(MEDIA.items())}
    return {name: made.speak(one, WORDS, FRAMES) for name, one in asked.items()}


@functools.cache
def talker(family: str, directory: Path) -> OmniTalker:
    return load_talker(reference(family, directory).directory, torch.float32, max_positions=512)


class Bench:
    """An engine, and what it has spoken, by session."""

    def __init__(
        self, family: str, weights: Path, directory: Path, *, pages: int = 128, budget: int = 64, save: bool = False
    ) -> None:
        directory.mkdir(exist_ok=True)
        model, path = talker(family, weights), reference(family, weights).directory
        self.model, self.hear = model, hearer_of(path)
        shape = model.decoder.config.page_shape(PAGE)
        self.pages = BlockPool(directory, "talker_pages", pages, shape, "float32", 4)
        scheduler = Scheduler(self.pages, PAGE, 16, budget)
        self.engine = TalkerEngine(model, torch_view(self.pages.data, "float32", shape), scheduler, 512)
        self.save = saver(self.pages, PAGE) if save else None
        self.codes: dict[int, list[torch.Tensor]] = {}
        self.ended: dict[int, Spoken] = {}
        self.batches: list[int] = []

    def add(self, session: int, speech: Speech, sampling: Sampling = GREEDY, frames: int = FRAMES) -> TalkerSequence:
        prompt = speech.asked.prompt
        heard = self.hear(np.array(speech.asked.ids, np.int32), prompt and prompt.positions)
        heard = Heard.from_json(json.loads(json.dumps(heard.to_json())))
        sequence = TalkerSequence(
            session=session, tokens=[], prompt_length=0, sampling=sampling, max_tokens=frames,
            script=self.model.script(heard, SPEAKER), save_kv=self.save,
        )
        self.codes[session] = []
        self.engine.add(sequence)
        return sequence

    def feed(self, sequence: TalkerSequence, rows: torch.Tensor) -> None:
        sequence.script.feed("", rows)
        self._take(self.engine.arrived(sequence))

    def finish(self, sequence: TalkerSequence) -> None:
        sequence.script.finish()
        self._take(self.engine.arrived(sequence))

    def whole(self, session: int, speech: Speech, sampling: Sampling = GREEDY, frames: int = FRAMES) -> TalkerSequence:
        sequence = self.add(session, speech, sampling, frames)
        self.feed(sequence, speech.rows)
        self.finish(sequence)
        return sequence

    def step(self) -> bool:
        made = self.engine.speak()
        self.batches.append(len(made))
        for one in made:
            self._take(one)
        return bool(made)

    def run(self, steps: int = 2000) -> None:
        for _ in range(steps):
            if not len(self.engine.scheduler):
                return
            self.step()
        raise AssertionError(f"still speaking: {[s.session for s in self.engine.scheduler.running]}")

    def said(self, session: int) -> list[list[int]]:
        return [codes.tolist() for codes in self.codes[session]]

    def _take(self, one: Spoken | None) -> None:
        if one is None:
            return
        assert one.error is None, one.error
        assert one.sequence.session not in self.ended
        if one.codes is not None:
            self.codes[one.sequence.session].append(one.codes)
        if one.finish is not None:
            self.ended[one.sequence.session] = one


@pytest.mark.parametrize("name", list(MEDIA))
def test_alone_all_codebooks_are_those_of_transformers(family: str, name: str, directory: Path, tmp_path: Path) -> None:
    speech = spoken(family, directory)[name]
    bench = Bench(family, directory, tmp_path)
    bench.whole(1, speech)
    bench.run()
    assert speech.codes.shape[1] == (4 if family == "qwen3" else 1)
    assert bench.said(1) == speech.codes.tolist()
    # One of them meets its stop token.
    assert len(speech.codes) == (16 if (family, name) == ("qwen3", "text") else FRAMES)
    assert bench.ended[1].finish == ("length" if len(speech.codes) == FRAMES else "stop")


@pytest.mark.parametrize(("pages", "save"), [(128, False), (9, False), (9, True)])
def test_together_and_in_any_pieces(family: str, pages: int, save: bool, directory: Path, tmp_path: Path) -> None:
    """Different lengths, prompts in chunks, rows that come between the steps; with few pages sequences lose theirs and go
    on, computed again or copied back, also while they wait."""
    every = list(spoken(family, directory).values())
    draw = random.Random(3)
    bench = Bench(family, directory, tmp_path, pages=pages, budget=24, save=save)
    sequences = [bench.add(session, speech) for session, speech in enumerate(every)]
    left = [[*torch.split(speech.rows, 1)] for speech in every]
    while any(left):
        at = draw.choice([n for n, rows in enumerate(left) if rows])
        count = draw.choice((1, 2, 3, 40))
        bench.feed(sequences[at], torch.cat(left[at][:count]))
        left[at] = left[at][count:]
        if not left[at]:
            bench.finish(sequences[at])
        for _ in range(draw.randrange(4)):
            bench.step()
    bench.run()
    for session, speech in enumerate(every):
        assert bench.said(session) == speech.codes.tolist()
    assert any(s.preemptions for s in sequences) == (pages == 9)
    assert bench.pages.available == pages


def test_a_seed_gives_the_same_codes_alone_and_among_sixteen(family: str, directory: Path, tmp_path: Path) -> None:
    every = list(spoken(family, directory).values())
    sampling = [replace(speech_defaults(reference(family, directory).directory).sampling, seed=seed) for seed in range(16)]
    together = Bench(family, directory, tmp_path / "together", pages=160)
    for session in range(16):
        together.whole(session, every[session % 4], sampling[session])
    together.run()
    assert max(together.batches) == 16
    for session in (0, 5, 15):
        alone = Bench(family, directory, tmp_path / str(session))
        alone.whole(session, every[session % 4], sampling[session])
        alone.run()
        assert alone.said(session) == together.said(session)
    assert len({str(together.said(session)) for session in (0, 4, 8, 12)}) == 4


def test_a_stop_token_ends_the_speech(family: str, directory: Path, tmp_path: Path) -> None:
    """With random weights the real ones are rare, so another is made one, here and there."""
    made = reference(family, directory)
    asked = ask_text(made)
    code = int(made.speak(asked, WORDS, 12).codes[9, 0])
    want = made.speak(asked, WORDS, FRAMES, stops=[code])
    model = talker(family, directory)
    stops, model.stops = model.stops, frozenset((code,))
    try:
        bench = Bench(family, directory, tmp_path)
        bench.whole(1, want)
        bench.run()
    finally:
        model.stops = stops
    assert bench.said(1) == want.codes.tolist() and 0 < len(want.codes) < 10
    assert bench.ended[1].finish == "stop" and bench.ended[1].codes is None
    assert bench.pages.available == 128


def test_a_sequence_that_waits_is_in_no_step(family: str, directory: Path, tmp_path: Path) -> None:
    first, other = (spoken(family, directory)[name] for name in ("text", "sound"))
    bench = Bench(family, directory, tmp_path)
    waiting = bench.add(1, first)
    prompt = len(first.asked.ids)
    bench.feed(waiting, first.rows[:prompt])
    assert not bench.step() and bench.engine.steps == 0 and bench.pages.available == 128
    bench.feed(waiting, first.rows[prompt : prompt + 2])
    # The first word belongs to the prompt; the second goes with the first frame.
    while bench.step():
        pass
    assert len(bench.codes[1]) == 2
    steps, held = bench.engine.steps, bench.pages.available
    bench.step()
    assert (bench.engine.steps, bench.pages.available) == (steps, held)
    bench.whole(2, other)
    bench.batches.clear()
    while 2 not in bench.ended:
        bench.step()
    assert max(bench.batches) == 1
    bench.feed(waiting, first.rows[prompt + 2 :])
    bench.finish(waiting)
    bench.run()
    assert bench.said(1) == first.codes.tolist() and bench.said(2) == other.codes.tolist()


def test_short_answers(family: str, directory: Path, tmp_path: Path) -> None:
    """One token is spoken, none is silence; nothing of a prompt alone."""
    made = reference(family, directory)
    speech = made.speak(ask_text(made), 2, FRAMES)
    bench = Bench(family, directory, tmp_path)
    bench.whole(1, speech)
    silent = bench.add(2, speech)
    bench.feed(silent, speech.rows[: len(speech.asked.ids)])
    assert 2 not in bench.ended
    bench.finish(silent)
    assert bench.ended[2].finish == "stop" and not bench.codes[2]
    bench.run()
    assert len(speech.rows) == len(speech.asked.ids) + 1
    assert bench.said(1) == speech.codes.tolist() and len(bench.codes[1]) > 5


def test_the_last_word_is_heard(family: str, directory: Path, tmp_path: Path) -> None:
    """Another last row changes the frames from its own on, and none before."""
    speech = spoken(family, directory)["text"]
    other = replace(speech, rows=torch.cat((speech.rows[:-1], -speech.rows[-1:])))
    bench = Bench(family, directory, tmp_path)
    bench.whole(1, speech)
    bench.whole(2, other)
    bench.run()
    last = len(speech.rows) - len(speech.asked.ids) - 1
    assert bench.said(1)[:last] == bench.said(2)[:last]
    assert bench.said(1)[last:] != bench.said(2)[last:]


def test_what_is_cancelled_gives_its_pages_back(family: str, directory: Path, tmp_path: Path) -> None:
    """At every stage of a life: without its prompt, queued, on its way through the prompt, speaking, waiting."""
    speech = spoken(family, directory)["both"]
    prompt = len(speech.asked.ids)
    bench = Bench(family, directory, tmp_path, budget=16)
    opening = bench.add(1, speech)
    bench.feed(opening, speech.rows[:prompt])
    waiting = bench.add(2, speech)
    bench.feed(waiting, speech.rows[: prompt + 1])
    while bench.step() or not bench.codes[2]:
        pass
    speaking, half, queued = bench.whole(3, speech), bench.whole(4, speech), bench.whole(5, speech)
    while not bench.codes[3]:
        bench.step()
    assert waiting.pages and speaking.pages and half.pages and not half.codes and opening.pages == []
    used = 128 - bench.pages.available
    assert used == sum(len(one.pages) for one in (waiting, speaking, half, queued))
    for one in (opening, waiting, speaking, half, queued):
        bench.engine.remove(one)
    assert bench.pages.available == 128 and not len(bench.engine.scheduler)
    bench.whole(6, speech)
    bench.run()
    assert bench.said(6) == speech.codes.tolist()


def test_a_prompt_that_is_too_long_is_refused(family: str, directory: Path, tmp_path: Path) -> None:
    speech = spoken(family, directory)["both"]
    bench = Bench(family, directory, tmp_path)
    bench.engine.max_length = 40
    sequence = bench.add(1, speech)
    sequence.script.feed("", speech.rows)
    refused = bench.engine.arrived(sequence)
    assert refused is not None and refused.error is not None and "allowed: 39" in refused.error.message
    assert bench.pages.available == 128


def test_voices(family: str, directory: Path) -> None:
    path = reference(family, directory).directory
    voices = voices_of(path)
    names = ("aiden", "chelsie", "ethan") if family == "qwen3" else ("Chelsie", "Ethan")
    assert voices.names == names
    assert voices.default == ("ethan" if family == "qwen3" else "Chelsie")
    assert voices.pick("") == voices.default and voices.pick("CHELSIE").lower() == "chelsie"
    with pytest.raises(InvalidArgument, match=f"voice: 'nobody' is not allowed; allowed: {', '.join(names)}"):
        talker(family, directory).script(Heard(1, ((0, 1),)), "nobody")


def test_speakers_sound_different(directory: Path, tmp_path: Path) -> None:
    speech = spoken("qwen3", directory)["text"]
    bench = Bench("qwen3", directory, tmp_path)
    first, other = bench.add(1, speech), bench.add(2, speech)
    heard = bench.hear(np.array(speech.asked.ids, np.int32), None)
    other.script = bench.model.script(heard, "aiden")
    for one in (first, other):
        bench.feed(one, speech.rows)
        bench.finish(one)
    bench.run()
    assert bench.said(1) == speech.codes.tolist() != bench.said(2)


def test_defaults_are_the_checkpoints(family: str, directory: Path, tmp_path: Path) -> None:
    path = reference(family, directory).directory
    plain = speech_defaults(path)
    assert plain.max_frames == 4096
    top_k, top_p = (50, 1.0) if family == "qwen3" else (40, 0.8)
    assert plain.sampling == Sampling(temperature=0.9, top_k=top_k, top_p=top_p, repetition_penalty=1.05)
    for name in ("config.json", "generation_config.json", "spk_dict.pt"):
        if (path / name).exists():
            shutil.copy(path / name, tmp_path)
    given = json.loads((tmp_path / "generation_config.json").read_text())
    given |= {"talker_temperature": 0.5, "talker_top_k": 7, "talker_max_new_tokens": 99}
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    changed = speech_defaults(tmp_path)
    assert changed.max_frames == 99
    assert changed.sampling == replace(plain.sampling, temperature=0.5, top_k=7)
