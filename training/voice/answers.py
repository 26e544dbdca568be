"""What the Talker learns to speak: answers of one to four sentences, cut into clauses as the server cuts them."""

from __future__ import annotations

import random
from pathlib import Path

from training.voice import sources
from tritone.models.voice.clauses import ClauseSplitter

SEED = 20
DEFINITIONS, FIGURE_ROWS, NUMBERS = 12_000, 4_000, 3_000
LONGEST = 48
"""Words of an answer of several sentences, at most."""


def answers(cache: Path, unseen: frozenset[str]) -> list[str]:
    """All answers, in the order of training data: the same on every machine. Sentences in ``unseen``, in lower case, are
    left out."""
    draw = random.Random(SEED)
    examples, definitions = sources.wordnet(cache)
    sentences = examples + draw.sample(definitions, DEFINITIONS) + sources.questions() + sources.numbers(draw, NUMBERS)
    sentences += sources.figure_rows(draw, FIGURE_ROWS)
    sentences = [sentence for sentence in sentences if sentence.lower() not in unseen]
    draw.shuffle(sentences)
    joined = []
    while sentences:
        wanted, parts = draw.choice((1, 1, 1, 2, 2, 3, 4)), [sentences.pop()]
        while len(parts) < wanted and sentences and len(" ".join([*parts, sentences[-1]]).split()) <= LONGEST:
            parts.append(sentences.pop())
        joined.append(" ".join(parts))
    return joined


def clauses(answer: str) -> list[str]:
    """The clauses of one answer, as the Talker gets them."""
    splitter = ClauseSplitter()
    return splitter.feed(answer) + splitter.flush()
