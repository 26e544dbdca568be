"""Cutting streamed text into clauses to be spoken."""

from __future__ import annotations

import random

import pytest

from tritone.models.voice.clauses import LONGEST_CLAUSE, LONGEST_WORD, ClauseSplitter

PROSE = (
    "Certainly, I can help with that. The meeting with Dr. Smith starts at 7:30 p.m. on March 3, 2024, "
    "and 1,250 people, "
    "i.e. more than last year's 999.5, are expected; see https://example.com/a,b.c?d=1. Bring water!\n\n"
    'There is a U.S. office in Rome... maybe two. "Really?" he asked. Yes - really. '
    "If nobody stops this sentence it will go on and on without any mark that could be used to end it because "
    "that is "
    "how people sometimes talk when they have had too much coffee and nobody has the heart to tell them\n"
    "that they should stop. J. K. Rowling wrote No. 7. The end"
)
MARKDOWN = """**Note:** this is *very* important! 😊 Let's go.

# Title
- first item
- [x] second item
1. Third
> quoted `code` and [a link](https://example.com/x?y=z).

| name | size |
|------|------|
| cat  | 2    |

```python
print(x)
```
~~gone~~ _so_ snake_case 5️⃣ done"""


def split(text: str, cuts: list[int] | None = None) -> list[str]:
    splitter = ClauseSplitter()
    clauses: list[str] = []
    ends = [*(cuts or []), len(text)]
    start = 0
    for end in ends:
        clauses += splitter.feed(text[start:end])
        start = end
    return clauses + splitter.flush()


def spoken(text: str) -> str:
    return "".join(c for c in text if c.isalnum())


@pytest.mark.parametrize("text", [PROSE, MARKDOWN, "a" * 500, "5", "Hi 👩‍👩‍👧 there. É e\u0301 done", " \n x\n\n"])
def test_clauses_do_not_depend_on_deltas(text: str) -> None:
    expected = split(text)
    assert split(text, list(range(len(text)))) == expected
    draw = random.Random(7)
    for _ in range(100):
        cuts = sorted(draw.randrange(len(text) + 1) for _ in range(draw.randrange(40)))
        assert split(text, cuts) == expected


def test_no_speakable_character_is_lost() -> None:
    assert spoken("".join(split(PROSE))) == spoken(PROSE)
    draw = random.Random(3)
    letters = "abcXYZ019 .,;:!?-—'\"()\n   "
    for _ in range(300):
        text = "".join(draw.choice(letters) for _ in range(draw.randrange(400)))
        assert spoken("".join(split(text))) == spoken(text), repr(text)


def test_words_and_numbers_stay_whole() -> None:
    words = PROSE.split()
    assert [w for clause in split(PROSE) for w in clause.split()] == words
    joined = "\n".join(split(PROSE))
    for whole in [
        "Dr. Smith",
        "7:30 p.m.",
        "March 3, 2024,",
        "1,250",
        "U.S. office",
        "J. K. Rowling",
        "No. 7.",
    ]:
        assert whole in joined


@pytest.mark.parametrize(
    ("text", "clauses"),
    [
        ("The capital of France is Paris.", ["The capital of France is Paris."]),
        ("Yes, I can help you.", ["Yes,", "I can help you."]),
        ("Stop! Who goes there? Me.", ["Stop!", "Who goes there?", "Me."]),
        ('"Stop!" he said. Then silence.', ['"Stop!"', "he said.", "Then silence."]),
        ("Pi is 3.14. Good.", ["Pi is 3.14.", "Good."]),
        ("The answer is no. But wait.", ["The answer is no.", "But wait."]),
        ("1. First\n2. Second", ["1. First", "2. Second"]),
        ("one line\nwrapped here", ["one line wrapped here"]),
        ("one line\n\nanother", ["one line", "another"]),
        ("See [the docs](https://x.com/a_b) now", ["See the docs now"]),
        ("2 * 3 is 6 and 2**3 is 8", ["2 times 3 is 6 and 2 to the power of 3 is 8"]),
        ("Great! 😊 Next.", ["Great!", "Next."]),
        ("Hello 😊.", ["Hello."]),
        ("seven three nine zero two", ["seven three nine zero two"]),
        ("The quick brown fox jumps over the lazy dog.", ["The quick brown fox jumps over the lazy dog."]),
    ],
)
def test_where_clauses_end(text: str, clauses: list[str]) -> None:
    assert split(text) == clauses


def test_markdown_is_silent_and_its_text_is_not() -> None:
    assert split(MARKDOWN) == [
        "Note:",
        "this is very important!",
        "Let's go.",
        "Title",
        "first item",
        "second item",
        "1. Third",
        "quoted code and a link.",
        "name, size",
        "cat, 2",
        "print(x)",
        "gone so snake_case 5 done",
    ]


@pytest.mark.parametrize("text", ["", "   \n", "😊🎉", "***", "---\n===", "...", "**", "# ", "- ", "\ufeff", "\u200d"])
def test_unspeakable_text_gives_nothing(text: str) -> None:
    assert split(text) == []


@pytest.mark.parametrize("text", ["5", "A", "I", "a", "No", "%", "+", "½", "B.", "**7**"])
def test_shortest_answers_are_kept(text: str) -> None:
    assert split(text) == [text.strip("*")]


def test_first_clause_comes_early_without_punctuation() -> None:
    splitter = ClauseSplitter()
    text = "this answer has no punctuation at all but goes on and on as some models do"
    for count, word in enumerate(text.split(), 1):
        if clauses := splitter.feed(f" {word}"):
            assert clauses == ["this answer has no punctuation at all"]
            assert count <= 9
            return
    pytest.fail("no clause came")


def test_first_clause_never_ends_on_an_article() -> None:
    assert split("we went all the way up to the top of the hill today")[0].split()[-1] not in {
        "the",
        "of",
        "to",
        "a",
    }


def test_length_is_capped() -> None:
    draw = random.Random(5)
    for text in ["word " * 500, "1 " * 500, "1234567890 " * 100, "x" * 2000, "a,b" * 700]:
        assert all(len(c) <= LONGEST_CLAUSE + LONGEST_WORD * 2 for c in split(text))
    text = " ".join("x" * draw.randrange(1, 12) for _ in range(2000))
    clauses = split(text)
    assert max(map(len, clauses)) <= LONGEST_CLAUSE + 12
    assert " ".join(clauses) == text


def test_flush_begins_another_text() -> None:
    splitter = ClauseSplitter()
    for _ in range(2):
        assert splitter.feed("Well, this is it") == ["Well,"]
        assert splitter.flush() == ["this is it"]
    assert splitter.flush() == []


def test_long_text_takes_linear_time() -> None:
    text = PROSE * 200
    assert spoken("".join(split(text))) == spoken(text)
