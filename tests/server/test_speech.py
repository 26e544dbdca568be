"""Speech through the whole server says what the text says: heard by Whisper tiny.en."""

from __future__ import annotations

import numpy as np
import pytest

from tests.asr import DIGIT_STRINGS, transcribe, word_errors
from tritone.client import Client
from tritone.models.voice.talker import HibariTalker, TalkerSession
from tritone.models.voice.voicebox import VoiceBox
from tritone.supervisor import Server

SAMPLE_RATE = 24_000

QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about a dog.",
    "Say something kind to a friend.",
    "Write one short sentence about the sea.",
    "Name the seasons of the year.",
    "What color is the sky?",
    "Write one sentence about a cat.",
    "What do bees make?",
    "Describe the moon in one sentence.",
    "What is your favourite season?",
    "Write one sentence about music.",
    "How do I make tea?",
    "Why is sleep important?",
    "Write one sentence about rain.",
    "What is a good breakfast?",
    "Describe a forest in one sentence.",
    "What is a bicycle?",
    "Write one sentence about a train.",
    "What is the sun?",
    "How can I be a good neighbour?",
)


@pytest.fixture(scope="module")
def client(server: Server) -> Client:
    return Client(server.grpc_url, timeout=60)


def spoken(client: Client, text: str, **options: float | str | bool) -> np.ndarray:
    chunks = [event.audio for event in client.speak(text, seed=1, **options) if event.kind == "audio"]
    assert chunks, f"{text!r} was not spoken"
    return np.concatenate([chunk for chunk in chunks if chunk is not None])


def test_digits_are_heard_as_written(client: Client) -> None:
    counts = [word_errors(text, transcribe(spoken(client, text))) for text in DIGIT_STRINGS]
    assert sum(errors for errors, _ in counts) / sum(words for _, words in counts) <= 0.05


def test_answers_of_the_model_are_heard_as_shown(client: Client) -> None:
    errors = words = 0
    for question in QUESTIONS:
        text, chunks = "", []
        for event in client.chat(question, max_tokens=24, temperature=0.0, repetition_penalty=1.2, seed=1):
            text += event.text if event.kind == "text" else ""
            if event.kind == "audio" and event.audio is not None:
                chunks.append(event.audio)
        wrong, total = word_errors(text, transcribe(np.concatenate(chunks)))
        errors, words = errors + wrong, words + total
    assert errors / words <= 0.05


@pytest.mark.parametrize("text", ["Yes", "No.", "Paris", "5", "A", "I", "Hello"])
def test_one_word_and_one_character_are_spoken(client: Client, text: str) -> None:
    audio = spoken(client, text)
    assert len(audio) > 0.15 * SAMPLE_RATE
    assert np.abs(audio).max() > 0.02


def test_a_one_token_answer_is_spoken(client: Client) -> None:
    events = list(client.chat("What is the capital of France?", max_tokens=1, temperature=0.0, seed=1))
    assert [event.text for event in events if event.kind == "text"] == ["The"]
    assert sum(len(event.audio) for event in events if event.audio is not None) > 0.1 * SAMPLE_RATE


def test_the_last_word_is_spoken(client: Client) -> None:
    for text in ("The last word of this sentence is banana", "First one, then another, and finally a potato."):
        assert transcribe(spoken(client, text)).lower().rstrip(". ").endswith(text.rstrip(".").split()[-1])


def test_streamed_audio_is_the_one_shot_audio(client: Client, deployment) -> None:  # type: ignore[no-untyped-def]
    """The samples a client receives are those of each clause synthesised in one piece."""
    text = "It was the best of times, it was the worst of times. The capital of France is Paris."
    box = VoiceBox(deployment.voice)
    session = TalkerSession(HibariTalker(deployment.voice))
    clauses = [*session.feed(text), *session.finish()]
    whole = np.concatenate([box.oneshot(frames, 1, number) for number, frames in enumerate(clauses)])
    streamed = spoken(client, text)
    assert len(streamed) == len(whole) == 300 * sum(len(frames) for frames in clauses)
    assert np.abs(streamed - whole).max() <= 1e-4


def test_joined_answer_carries_the_same_audio(client: Client) -> None:
    text = "Thank you for calling, how can I help you today?"
    (joined,) = list(client.speak(text, seed=1, stream=False))
    assert joined.kind == "end" and joined.audio is not None
    assert np.array_equal(joined.audio, spoken(client, text))
    assert joined.info["usage"]["audio_seconds"] == pytest.approx(len(joined.audio) / SAMPLE_RATE)
    assert joined.info["sample_rate"] == SAMPLE_RATE


def test_no_click_where_chunks_meet(client: Client) -> None:
    text = "The doctor said I should rest for a few days, and the library closes at nine in the evening."
    chunks = [event.audio for event in client.speak(text, seed=1) if event.audio is not None]
    borders = np.cumsum([len(chunk) for chunk in chunks])[:-1]
    steps = np.abs(np.diff(np.concatenate(chunks)))
    at_borders = steps[borders - 1]
    elsewhere = np.delete(steps, borders - 1)
    assert len(borders) >= 3
    assert at_borders.max() <= np.percentile(elsewhere, 99.9)


def test_speed_and_seed(client: Client) -> None:
    text = "Our flight to London was delayed by an hour."
    normal = spoken(client, text)
    assert len(spoken(client, text, speed=2.0)) < 0.65 * len(normal)
    assert len(spoken(client, text, speed=0.5)) > 1.6 * len(normal)
    assert np.array_equal(spoken(client, text), normal)


def test_equal_requests_at_once_give_equal_audio(client: Client) -> None:
    text = "We will meet again next week on Monday."
    streams = [client.speak(text, seed=1) for _ in range(5)]
    audios = [np.concatenate([e.audio for e in stream if e.audio is not None]) for stream in streams]
    assert all(np.array_equal(audio, audios[0]) for audio in audios[1:])


def test_text_that_cannot_be_spoken_gives_text_and_no_audio(client: Client) -> None:
    events = list(client.speak("🎉 🎉", seed=1))
    assert [event.kind for event in events] == ["end"]
    assert events[0].info["usage"]["audio_seconds"] == 0
