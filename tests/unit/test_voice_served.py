"""The trained voice in the Talkers' engine: what the reference says, alone and together, from text in any pieces."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tritone.engine.scheduler import Scheduler
from tritone.engine.talker import Spoken, TalkerEngine, TalkerSequence
from tritone.errors import InvalidArgument
from tritone.models.codec.codec import Codes
from tritone.models.talker.config import HEART, READ
from tritone.models.talker.files import load_network
from tritone.models.talker.generate import speak
from tritone.models.talker.served import PASSAGE_UNITS, VoiceScript, VoiceTalker, load_voice
from tritone.models.talker.text import TextReader
from tritone.models.voice.clauses import ClauseSplitter
from tritone.options import Sampling
from tritone.pools.free_list import FreeList

PAGE, PAGES = 16, 400
TEXTS = ("Hello there.", "Five small birds, and one cat.", "It costs $5. That is not much, is it?", "Yes")
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def model() -> VoiceTalker:
    return load_voice(HEART, torch.float32)


class Bench:
    """An engine with its sequences' codes."""

    def __init__(self, model: VoiceTalker) -> None:
        self.model = model
        kv = torch.zeros(PAGES, *model.decoder.config.page_shape(PAGE))
        self.engine = TalkerEngine(model, kv, Scheduler(FreeList(PAGES), PAGE, 16, 64), 1000)
        self.codes: dict[int, list[list[int]]] = {}
        self.segments: dict[int, list[int]] = {}
        """How many frames there were at the end of each."""
        self.ended: dict[int, str | None] = {}

    def add(self, session: int, sampling: Sampling = GREEDY) -> TalkerSequence:
        self.codes[session], self.segments[session] = [], []
        script = self.model.script("")
        return self._sequence(session, sampling, script)

    def _sequence(self, session: int, sampling: Sampling, script: VoiceScript) -> TalkerSequence:
        sequence = TalkerSequence(session=session, tokens=[], prompt_length=0, sampling=sampling, max_tokens=900, script=script)
        self.engine.add(sequence)
        return sequence

    def feed(self, sequence: TalkerSequence, text: str | None, hidden: torch.Tensor | None = None) -> None:
        """None: the text has ended."""
        script = sequence.script
        assert isinstance(script, VoiceScript)
        if text is None:
            script.finish()
        else:
            script.feed(text, hidden)
        self._take(self.engine.arrived(sequence))

    def step(self) -> None:
        for spoken in self.engine.speak():
            self._take(spoken)

    def run(self) -> None:
        for _ in range(2000):
            if len(self.ended) == len(self.codes):
                return
            self.step()
        raise AssertionError("still speaking")

    def _take(self, spoken: Spoken | None) -> None:
        if spoken is None:
            return
        assert spoken.error is None, spoken.error
        session, script = spoken.sequence.session, spoken.sequence.script
        assert isinstance(script, VoiceScript)
        if spoken.codes is not None:
            self.codes[session].append(spoken.codes.tolist())
        if script.paused and self.codes[session]:
            self.segments[session].append(len(self.codes[session]))
        if spoken.finish == "stop" and script.resume():
            assert self.engine.arrived(self._sequence(session, spoken.sequence.sampling, script)) is None
        elif spoken.finish is not None:
            self.ended[session] = spoken.finish


def clauses_of(text: str) -> list[str]:
    splitter = ClauseSplitter()
    return splitter.feed(text) + splitter.flush()


def units(script: VoiceScript) -> list[torch.Tensor]:
    """Every unit of a script whose text has ended, as a model that asks for nothing else gets them."""
    found = []
    while True:
        row = script.next(READ, None)
        if row is not None:
            found.append(row)
        elif not script.resume():
            return found


@pytest.fixture(scope="module")
def expected() -> dict[str, list[Codes]]:
    """By the network in plain torch."""
    network, reader = load_network(HEART), TextReader()
    return {text: speak(network, [unit for clause in clauses_of(text) for unit in reader.read(clause)]) for text in TEXTS}


def test_the_engine_says_what_the_reference_says(model: VoiceTalker, expected: dict[str, list[Codes]]) -> None:
    bench = Bench(model)
    for session, text in enumerate(TEXTS):
        sequence = bench.add(session)
        bench.feed(sequence, text)
        bench.feed(sequence, None)
    bench.run()
    for session, text in enumerate(TEXTS):
        parts = expected[text]
        assert bench.ended[session] == "stop" and len(parts) == len(clauses_of(text))
        assert all(len(part) > 4 for part in parts)
        assert bench.codes[session] == np.concatenate(parts).tolist()
        assert bench.segments[session] == np.cumsum([len(part) for part in parts]).tolist()


def test_text_in_any_pieces_and_late_is_the_same_speech(model: VoiceTalker, expected: dict[str, list[Codes]]) -> None:
    draw, bench = random.Random(2), Bench(model)
    sequences = [bench.add(session) for session in range(len(TEXTS))]
    left = [list(text) for text in TEXTS]
    while any(left):
        at = draw.choice([n for n, characters in enumerate(left) if characters])
        count = draw.randint(1, 4)
        bench.feed(sequences[at], "".join(left[at][:count]))
        left[at] = left[at][count:]
        if not left[at]:
            bench.feed(sequences[at], None)
        for _ in range(draw.randrange(12)):
            bench.step()
    bench.run()
    for session, text in enumerate(TEXTS):
        assert bench.codes[session] == np.concatenate(expected[text]).tolist()


def test_an_end_that_comes_late_ends_a_speech_that_waits_for_more(model: VoiceTalker, expected: dict[str, list[Codes]]) -> None:
    bench = Bench(model)
    sequence = bench.add(1)
    bench.feed(sequence, "Hello there. 🎉")  # what comes after it may be more to say, and is not
    for _ in range(100):
        bench.step()
    assert not bench.ended and bench.codes[1] == expected["Hello there."][0].tolist()
    bench.feed(sequence, None)
    assert bench.ended == {1: "stop"} and not len(bench.engine.scheduler)


def test_a_seed_says_the_same_alone_and_among_sixteen(model: VoiceTalker) -> None:
    sampling = [Sampling(temperature=0.8, top_k=20, seed=seed) for seed in range(16)]
    together = Bench(model)
    for session in range(16):
        sequence = together.add(session, sampling[session])
        together.feed(sequence, TEXTS[session % 4])
        together.feed(sequence, None)
    together.run()
    for session in (0, 5, 14):
        alone = Bench(model)
        sequence = alone.add(session, sampling[session])
        alone.feed(sequence, TEXTS[session % 4])
        alone.feed(sequence, None)
        alone.run()
        assert alone.codes[session] == together.codes[session]
    assert len({str(together.codes[session]) for session in (0, 4, 8, 12)}) == 4


def test_hidden_states_reach_the_rows_of_their_words(model: VoiceTalker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "_context", torch.randn(192, model.context_size, generator=torch.Generator().manual_seed(2)))
    plain, known, foreign = model.script(""), model.script(""), model.script("")
    hidden = torch.randn(3, model.context_size, generator=torch.Generator().manual_seed(1))
    plain.feed("One two. ")
    known.feed("One", hidden[:1])
    known.feed(" two. ", hidden[1:])
    foreign.feed("One two. ", torch.ones(3, model.context_size + 1))
    for script in (plain, known, foreign):
        script.finish()
    other, without, rows = (torch.stack(units(script)) for script in (foreign, plain, known))
    assert torch.equal(other, without)
    assert rows.shape == without.shape and torch.isfinite(rows).all()
    (text,) = TextReader().read("One two.")
    (tokens,) = [np.cumsum(text.ids == 16)[text.picks]]
    change = (rows - without).abs().amax(1)
    assert (change > 0).all()  # every unit belongs to a word, and each word to a token
    first, second = rows[tokens == 0] - without[tokens == 0], rows[tokens == 1] - without[tokens == 1]
    assert torch.allclose(first, first[:1].expand_as(first), atol=1e-5)
    assert torch.allclose(second, second[:1].expand_as(second), atol=1e-5)
    assert not torch.allclose(first[0], second[0], atol=1e-4)


def test_a_long_text_is_spoken_in_passages(model: VoiceTalker) -> None:
    """Each as if it was a text of its own, cut between clauses where it would be too long."""
    sentence = "The lazy dog sleeps. "
    whole, one = model.script(""), model.script("")
    whole.feed(sentence * 40)
    whole.finish()
    one.feed(sentence)
    one.finish()
    size = len(units(one))
    lengths = []
    while True:
        count = 0
        while whole.next(READ, None) is not None:
            count += 1
        lengths.append(count)
        assert whole.over
        if not whole.resume():
            break
    assert sum(lengths) == 40 * size and len(lengths) > 3
    assert all(PASSAGE_UNITS - size < length <= PASSAGE_UNITS for length in lengths[:-1])

    monologue = Bench(model)
    sequence = monologue.add(1)
    monologue.feed(sequence, sentence * 14)
    monologue.feed(sequence, None)
    monologue.run()
    assert monologue.ended == {1: "stop"} and len(monologue.engine.scheduler) == 0
    per_passage = lengths[0] // size
    assert per_passage == PASSAGE_UNITS // size < 14
    first = monologue.codes[1][: monologue.segments[1][per_passage - 1]]
    alone = Bench(model)
    sequence = alone.add(1)
    alone.feed(sequence, sentence * per_passage)
    alone.feed(sequence, None)
    alone.run()
    assert alone.codes[1] == first


def test_nothing_to_say_ends_at_once(model: VoiceTalker) -> None:
    bench = Bench(model)
    sequence = bench.add(1)
    bench.feed(sequence, "... 🎉")
    bench.feed(sequence, None)
    assert bench.ended == {1: "stop"} and bench.codes == {1: []}


def test_an_unknown_voice_is_refused(model: VoiceTalker) -> None:
    with pytest.raises(InvalidArgument, match=r"voice.*'nobody'.*heart"):
        model.script("nobody")


def test_the_shipped_files_are_what_they_say() -> None:
    import hashlib
    import json

    files = json.loads((HEART / "voice.json").read_text())["files"]
    assert {"LICENSE", "NOTICE", "talker/model.safetensors"} < files.keys()
    for name, digest in files.items():
        assert hashlib.sha256((HEART / name).read_bytes()).hexdigest() == digest
    weights = sum((HEART / name).stat().st_size for name in files if name.endswith(".safetensors"))
    assert weights <= 10_000_000
