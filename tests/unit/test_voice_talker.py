"""The Talker: what it says, to whom and how fast; and that Whisper understands it."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import pytest

from tests.asr import DIGIT_STRINGS, SENTENCES, normalise, transcribe, word_errors
from tritone.models.voice.chunks import plan_chunks
from tritone.models.voice.pauses import trim_pauses
from tritone.models.voice.phonemes import Phonemiser
from tritone.models.voice.prepare import prepare_voice
from tritone.models.voice.talker import HibariTalker, TalkerSession
from tritone.models.voice.voicebox import VoiceBox, VoiceBoxStream


@pytest.fixture(scope="module")
def voice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_voice(tmp_path_factory.mktemp("voices") / "heart")


@pytest.fixture(scope="module")
def talker(voice: Path) -> HibariTalker:
    talker = HibariTalker(voice)
    talker.warm_up()
    return talker


@pytest.fixture(scope="module")
def box(voice: Path) -> VoiceBox:
    return VoiceBox(voice)


def say(talker: HibariTalker, box: VoiceBox, text: str, delta: int = 3) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """The text through the whole chain, fed a few characters at a time."""
    session, stream = TalkerSession(talker), VoiceBoxStream(box, seed=4)
    clauses = [f for at in range(0, len(text), delta) for f in session.feed(text[at : at + delta])]
    clauses += session.finish()
    pieces = [np.zeros(0, np.float32)]
    for frames in clauses:
        start, plan = 0, plan_chunks(len(frames))
        for index, size in enumerate(plan):
            pieces.append(stream.push(frames.slice(start, start + size), last=index == len(plan) - 1))
            start += size
    sound = np.concatenate(pieces)
    assert len(sound) == 300 * sum(map(len, clauses))
    return sound


def test_frames_of_a_clause(talker: HibariTalker) -> None:
    frames = talker.speak("Hello there.")
    assert frames.features.shape == (len(frames), 130) and frames.features.dtype == np.float32
    assert frames.f0.shape == (len(frames),) and frames.f0.dtype == np.float32
    assert 40 < len(frames) < 200
    assert frames.text == "Hello there."
    again = talker.speak("Hello there.")
    np.testing.assert_array_equal(frames.features, again.features)


@pytest.mark.parametrize("clause", ["", " ", "...", "😊", "你好", "\"'"])
def test_unspeakable_clause_gives_no_frames(talker: HibariTalker, clause: str) -> None:
    frames = talker.speak(clause)
    assert len(frames) == 0 and frames.features.shape == (0, 130)


def test_speed(talker: HibariTalker) -> None:
    slow, normal, fast = (len(talker.speak("How fast am I?", speed)) for speed in (0.5, 1, 2.0))
    assert slow > 1.6 * normal and normal > 1.6 * fast


@pytest.mark.parametrize("speed", [0.49, 2.01, -1, 0, math.nan, math.inf])
def test_other_speeds_are_refused(talker: HibariTalker, speed: float) -> None:
    with pytest.raises(ValueError, match=r"between 0\.5 and 2\.0"):
        talker.speak("Hello", speed)
    with pytest.raises(ValueError, match="speed is"):
        TalkerSession(talker, speed=speed)


@pytest.mark.parametrize("text", ["Hello there.", "Yes,", "once upon a time", "Sister"])
def test_only_silence_is_trimmed(talker: HibariTalker, box: VoiceBox, text: str) -> None:
    whole = talker.speak(text)
    trimmed = trim_pauses(whole)
    before, after = box.oneshot(whole, 1), box.oneshot(trimmed, 1)
    lead = next(i for i in range(len(whole)) if np.shares_memory(whole.f0[i : i + 1], trimmed.f0[:1]))
    start, end = lead * 300, lead * 300 + len(after)
    assert 8 <= lead <= 20
    assert max(np.abs(before[:start]).max(), np.abs(before[end:]).max(initial=0)) < 0.01
    assert np.corrcoef(before[start:end], after)[0, 1] > 0.99


def test_end_of_a_sentence_keeps_its_pause(talker: HibariTalker) -> None:
    for text, kept in [("I see.", True), ('"I see!"', True), ("I see,", False), ("I see", False)]:
        whole, trimmed = talker.speak(text), trim_pauses(talker.speak(text))
        assert (whole.f0[-1] == trimmed.f0[-1] and len(trimmed) + 14 >= len(whole)) == kept


@pytest.mark.parametrize("voice_name", ["emma", "", "Heart"])
def test_unknown_voice_is_refused_with_the_list(talker: HibariTalker, voice_name: str) -> None:
    with pytest.raises(ValueError, match=rf"'{voice_name}'.*available voices: heart"):
        TalkerSession(talker, voice_name)


def test_default_voice(talker: HibariTalker) -> None:
    assert talker.voices == ("heart",)
    assert TalkerSession(talker).voice == talker.default_voice == "heart"


def test_clause_longer_than_the_model_is_spoken_whole(talker: HibariTalker) -> None:
    number = "1234567890" * 15
    frames = talker.speak(f"{number} {number}")
    assert 80 * 20 < len(frames) < 80 * 300


def test_length_follows_the_text(talker: HibariTalker) -> None:
    for text in [*SENTENCES, "a" * 100, "ha " * 60, "?!" * 50 + "x"]:
        assert len(talker.speak(text)) <= 80 * (1.5 + 0.3 * len(text))


def test_feed_takes_the_text_even_if_nobody_iterates(talker: HibariTalker) -> None:
    session = TalkerSession(talker)
    unused = session.feed("First. ")
    rest = list(session.feed("Second. Third"))
    assert [f.text for f in [*unused, *rest, *session.finish()]] == ["First.", "Second.", "Third"]
    assert list(session.finish()) == []


@pytest.mark.parametrize(
    ("answer", "last_word"),
    [
        ("5", "five"),
        ("A", "a"),
        ("I", "i"),
        ("Yes.", "yes"),
        ("The answer is B", "b"),
        ("She gave him a red apple", "apple"),
    ],
)
def test_short_answers_are_heard_to_the_last_word(talker: HibariTalker, box: VoiceBox, answer: str, last_word: str) -> None:
    sound = say(talker, box, answer)
    assert len(sound) > 24000 * 0.25
    assert np.abs(sound).max() > 0.05
    if len(answer) > 1:  # a recogniser of speech cannot be asked for single letters
        assert normalise(transcribe(np.pad(sound, 4800)))[-1] in (
            last_word,
            {"b": "be"}.get(last_word, last_word),
        )


def test_a_letter_is_no_article() -> None:
    read = Phonemiser().phonemes
    for text in ("A", "a", "(a)", "A.", "The answer is A"):
        assert "ˈA" in read(text)


def test_figures_and_odd_characters_are_read() -> None:
    read = Phonemiser().phonemes
    assert read("776") == read("seven hundred seventy six")
    assert read("4111111111111111.") == read("4 " + "1 " * 15 + ".").replace(" .", ".")
    assert read("1,250,000,000,000,000") == read("one quadrillion two hundred fifty trillion")
    assert read("Ｈｅｌｌｏ ① 𝐝𝐨𝐠 ٣") == read("Hello 1 dog 3")


def test_no_text_breaks_the_talker(talker: HibariTalker) -> None:
    draw = random.Random(6)
    kinds = ["abcdXYZ ", "0123456789.,:/-$%", "'\"()[]{}<>*_`#~^|\\", "你пيé①Ⅷ²½٣😊\u0301\u200d", "a A.'-"]
    for _ in range(300):
        letters = "".join(draw.sample(kinds, draw.randint(1, 3)))
        talker.speak("".join(draw.choice(letters) for _ in range(draw.randint(1, 80))))


def test_one_bad_word_costs_no_clause(monkeypatch: pytest.MonkeyPatch) -> None:
    phonemiser = Phonemiser()
    rules = phonemiser._g2p

    def failing(text: str) -> str:
        if "red" in text:
            raise IndexError
        return str(rules(text))

    monkeypatch.setattr(phonemiser, "_g2p", failing)
    assert phonemiser.phonemes("a red apple") == f"{rules('a')} {rules('apple')}"


def test_word_errors_counts() -> None:
    assert word_errors("Seven three, nine!", "739") == (0, 3)
    assert word_errors("There are twelve months.", "There are 12 months") == (0, 5)
    assert word_errors("one hundred degrees", "100 degrees") == (0, 4)
    assert word_errors("twenty-one", "21") == (0, 2)
    assert word_errors("a b c", "a x c d") == (2, 3)
    assert word_errors("a b", "") == (2, 2)


@pytest.mark.parametrize("texts", [SENTENCES, DIGIT_STRINGS], ids=["sentences", "digits"])
def test_whisper_understands(talker: HibariTalker, box: VoiceBox, texts: tuple[str, ...]) -> None:
    errors = words = 0
    misheard = []
    for text in texts:
        heard = transcribe(say(talker, box, text))
        wrong, count = word_errors(text, heard)
        errors, words = errors + wrong, words + count
        if wrong:
            misheard.append((text, heard))
    print(f"{errors} of {words} words wrong")
    assert errors <= 0.05 * words, misheard
