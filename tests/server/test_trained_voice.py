"""The trained voice through a server of its own: what it says is heard, the same alone and together, and ends."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.asr import DIGIT_STRINGS, SENTENCES, transcribe, word_errors
from tests.server.helpers import Request, ask, ask_together, http_get, nothing_left_behind, refusal, wait_idle
from tests.server.serving import make_deployment
from tritone.models.talker.config import HEART
from tritone.models.talker.files import load_codec, load_network
from tritone.models.talker.generate import speak
from tritone.models.talker.text import TextReader
from tritone.models.voice.clauses import ClauseSplitter
from tritone.models.voice.voicebox import VoiceBox
from tritone.supervisor import Server

SAMPLE_RATE = 24_000
GREEDY = {"temperature": 0.0, "repetition_penalty": 1.2, "seed": 1}
QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about a dog.",
    "Name the seasons of the year.",
    "What do bees make?",
    "Why is sleep important?",
)


@pytest.fixture(scope="module")
def heart() -> Iterator[Server]:
    with Server(make_deployment(voice="demo:heart", talker={"dtype": "float32"})) as running:
        yield running


@pytest.fixture(autouse=True)
def unhurt(heart: Server) -> Iterator[None]:
    """After each test the server is ready, holds nothing, and has as many free blocks as before."""
    with nothing_left_behind(heart):
        yield


def spoken(heart: Server, text: str, **options: float | str) -> np.ndarray:
    answer = ask(heart, "speech", text, **({"seed": 1} | options))
    answer.check_complete()
    assert answer.end.kind == "end"
    return answer.audio


def test_sentences_and_digits_are_heard_as_written(heart: Server) -> None:
    for texts, allowed in ((SENTENCES[::2], 0.05), (DIGIT_STRINGS[::2], 0.02)):
        answers = ask_together(heart, "speech", [(text, {"seed": 1}) for text in texts])
        counts = [word_errors(text, transcribe(answer.audio)) for text, answer in zip(texts, answers, strict=True)]
        assert sum(errors for errors, _ in counts) / sum(words for _, words in counts) <= allowed


def test_answers_of_the_model_are_heard_as_shown(heart: Server) -> None:
    """With its hidden states; 24 tokens may end in half a word."""
    answers = ask_together(heart, "omni", [(question, GREEDY | {"max_tokens": 24}) for question in QUESTIONS])
    counts = []
    for answer in answers:
        answer.check_complete()
        counts.append(word_errors(answer.text, transcribe(answer.audio)))
        assert answer.usage["audio_seconds"] == pytest.approx(len(answer.audio) / SAMPLE_RATE)
    assert sum(errors for errors, _ in counts) / sum(words for _, words in counts) <= 0.05


def test_the_sound_is_that_of_the_network_clause_by_clause(heart: Server) -> None:
    text = "It was the best of times, it was the worst of times. The capital of France is Paris."
    splitter, reader = ClauseSplitter(), TextReader()
    clauses = [unit for clause in splitter.feed(text) + splitter.flush() for unit in reader.read(clause)]
    box, codec = VoiceBox(make_deployment(voice="demo:heart").voicebox.voice), load_codec(HEART)
    codes = speak(load_network(HEART), clauses)
    whole = np.concatenate([box.oneshot(codec.decode(part), 1, number) for number, part in enumerate(codes)])
    answer = ask(heart, "speech", text, seed=1)
    assert len(answer.audio) == len(whole) == 1200 * sum(map(len, codes))
    assert np.abs(answer.audio - whole).max() <= 1e-4
    assert answer.kinds.count("audio") > len(clauses), "clauses come in pieces"


@pytest.mark.parametrize("text", ["Yes", "No.", "Paris", "5", "A", "Hello"])
def test_one_word_is_spoken_and_ends(heart: Server, text: str) -> None:
    audio = spoken(heart, text)
    assert 0.15 * SAMPLE_RATE < len(audio) < 3 * SAMPLE_RATE
    assert np.abs(audio).max() > 0.02


def test_a_one_token_answer_is_spoken(heart: Server) -> None:
    answer = ask(heart, "omni", "What is the capital of France?", **GREEDY, max_tokens=1)
    answer.check_complete()
    assert answer.text == "The" and 0.1 * SAMPLE_RATE < len(answer.audio) < 3 * SAMPLE_RATE


def test_nothing_to_say_ends_without_sound(heart: Server) -> None:
    answer = ask(heart, "speech", "🎉 🎉", seed=1)
    assert answer.kinds == ["end"] and answer.usage["audio_seconds"] == 0


def test_a_text_of_several_passages_is_spoken_to_its_last_word(heart: Server) -> None:
    text = " ".join(SENTENCES[:12]) + " The last word is banana."
    answer = ask(heart, "speech", text, seed=1)
    answer.check_complete()
    assert len(answer.audio) > 20 * SAMPLE_RATE
    assert "banana" in transcribe(answer.audio[-3 * SAMPLE_RATE :]).lower()


def check_alone_and_among_sixteen(heart: Server) -> None:
    texts = [SENTENCES[index % 8] for index in range(16)]
    together = ask_together(heart, "speech", [(text, {"seed": 1}) for text in texts])
    for index in (0, 5, 7):
        alone = spoken(heart, texts[index])
        for answer in (together[index], together[index + 8]):
            assert np.array_equal(answer.audio, alone)
    asked = [(question, GREEDY | {"max_tokens": 12}) for question in QUESTIONS[:3]]
    answers = ask_together(heart, "omni", asked)
    for answer, (question, options) in zip(answers, asked, strict=True):
        assert np.array_equal(answer.audio, ask(heart, "omni", question, **options).audio)


def test_the_same_alone_and_among_sixteen(heart: Server) -> None:
    check_alone_and_among_sixteen(heart)


def test_pace(heart: Server) -> None:
    text = "Our flight to London was delayed by an hour."
    normal = len(spoken(heart, text))
    for speed in (0.5, 1.25, 2.0):
        made = spoken(heart, text, speed=speed)
        assert len(made) == pytest.approx(normal / speed, abs=600)
    assert word_errors(text, transcribe(spoken(heart, text, speed=0.8)))[0] <= 2


def test_a_client_that_leaves_stops_the_speech(heart: Server) -> None:
    for model, content in (("speech", " ".join(SENTENCES)), ("omni", "Tell me a long story about a lighthouse.")):
        options = {"max_tokens": 400, "ignore_eos": True, "temperature": 0.0} if model == "omni" else {}
        request = Request(heart, model, content, seed=1, **options)
        assert request.wait_for("audio").kind == "audio"
        request.cancel()
        wait_idle(heart)


def test_voices_are_listed_and_others_refused(heart: Server) -> None:
    found = http_get(heart, "/v2/models/speech/config")["parameters"]
    assert found["voices"]["string_value"] == found["default_voice"]["string_value"] == "heart"
    assert "voice: 'nobody' is not allowed; allowed: heart" in refusal(heart, "speech", "Hi", voice="nobody")


def test_the_same_alone_and_among_sixteen_in_bfloat16() -> None:
    """The precision the demo speaks in where the CPU has such products."""
    with Server(make_deployment(voice="demo:heart", talker={"dtype": "bfloat16"})) as running:
        check_alone_and_among_sixteen(running)
