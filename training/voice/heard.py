"""How well texts that were spoken are understood: by Whisper tiny.en, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tests.asr import transcribe, word_errors
from tritone.models.voice.frames import Float32Array

SAMPLE_RATE = 24_000


@dataclass(frozen=True)
class Heard:
    """errors of words; seconds of speech, and of one core for what was measured of it."""

    errors: int
    words: int
    seconds: float
    spent: float

    def __str__(self) -> str:
        share, pace = self.errors / self.words, self.seconds / self.spent
        return f"{self.errors} of {self.words} words wrong, {share:.1%}; {self.seconds:.0f} s of speech, {pace:.1f} x real time"


def listen(said: Iterable[tuple[str, Float32Array]], spent: Callable[[], float]) -> Heard:
    """``said``: texts, and samples at 24 kHz. ``spent`` gives the seconds of one core up to now; it is asked before and after
    each. Prints what was heard wrong."""
    errors = words = samples = 0
    used = 0.0
    begun = spent()
    for text, audio in said:
        used += spent() - begun
        samples += len(audio)
        heard = transcribe(audio)
        wrong, total = word_errors(text, heard)
        if wrong:
            print(f"  {wrong} of {total}: {text} -> {heard}", flush=True)
        errors, words = errors + wrong, words + total
        begun = spent()
    return Heard(errors, words, samples / SAMPLE_RATE, used)
