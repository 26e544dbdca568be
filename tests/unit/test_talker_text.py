"""What the autoregressive Talker reads: units of phonemes, and the Thinker's token of each."""

from __future__ import annotations

import numpy as np
import pytest

from tritone.models.talker.context import TokenTrack
from tritone.models.talker.text import SPACE, ClauseText, TextReader
from tritone.models.voice.clauses import ClauseSplitter
from tritone.models.voice.phonemes import Phonemiser


@pytest.fixture(scope="module")
def reader() -> TextReader:
    return TextReader()


def test_marks_go_with_the_unit_after_them(reader: TextReader) -> None:
    (text,) = reader.read("Hello again.")
    phonemes = Phonemiser().phonemes("Hello again.")
    assert len(text.ids) == len(phonemes) + 2  # an end mark on either side
    marks = {index + 1 for index, character in enumerate(phonemes) if character in " ˈˌ"}
    assert marks and set(text.picks) == set(range(len(text.ids))) - marks
    assert text.ids[1 + phonemes.index(" ")] == SPACE


def test_a_unit_begins_where_the_one_before_ends() -> None:
    text = ClauseText(np.array([0, 5, SPACE, 6, 0]), np.array([0, 1, 3, 4]))
    assert text.starts(np.array([10, 4, 3, 5, 8])).tolist() == [0, 10, 14, 22]


def test_nothing_to_pronounce_gives_no_unit(reader: TextReader) -> None:
    assert reader.read("...") == [] and reader.read("") == []


def test_long_clauses_are_read_in_pieces_between_words(reader: TextReader) -> None:
    clause = "one two three four five six seven eight nine ten"
    (whole,) = reader.read(clause)
    parts = reader.read(clause, 20)
    assert len(parts) > 2 and all(len(part.ids) <= 20 for part in parts)
    inner = np.concatenate([part.ids[1:-1] for part in parts])
    assert np.array_equal(inner[inner != SPACE], whole.ids[1:-1][whole.ids[1:-1] != SPACE])


def owners(reader: TextReader, pieces: list[str], clauses: list[str]) -> list[list[int]]:
    track = TokenTrack()
    for piece in pieces:
        track.feed(piece, 1)
    found = []
    for clause in clauses:
        (text,) = reader.read(clause)
        words = np.cumsum(text.ids == SPACE)[text.picks]
        (tokens,) = track.take(clause, [text])
        found.append([int(tokens[words == word][0]) for word in range(words[-1] + 1)])
        assert all(len(set(tokens[words == word])) == 1 for word in range(words[-1] + 1))
    return found


def test_every_word_has_its_last_token(reader: TextReader) -> None:
    pieces = ["The", " cap", "ital", " of", " France", ",", " by", " the", " way", ",", " is", " Paris", "."]
    splitter = ClauseSplitter()
    clauses = splitter.feed("".join(pieces)) + splitter.flush()
    assert clauses == ["The capital of France,", "by the way, is Paris."]
    assert owners(reader, pieces, clauses) == [[0, 2, 3, 4], [6, 7, 8, 10, 11]]


def test_a_number_of_many_words_has_the_tokens_around_it(reader: TextReader) -> None:
    ((*words,),) = owners(reader, ["About", " ", "5", "0", "0", " men"], ["About 500 men"])
    assert words[0] == 0 and words[-1] == 5 and set(words[1:-1]) <= {0, 4, 5}
    assert words == sorted(words)


def test_words_without_a_token_are_marked(reader: TextReader) -> None:
    assert owners(reader, ["One"], ["One two"]) == [[0, -1]]
    track = TokenTrack()
    track.feed("spoken without a Thinker", 0)
    (text,) = reader.read("spoken")
    assert set(track.take("spoken", [text])[0]) == {-1}


def test_several_tokens_share_a_text(reader: TextReader) -> None:
    track = TokenTrack()
    track.feed("ab", 1)
    track.feed("cdef", 2)
    (text,) = reader.read("ab cd ef")
    assert list(dict.fromkeys(track.take("ab cd ef", [text])[0].tolist())) == [0, 1, 2]


def test_the_pieces_of_a_long_clause_go_on_where_the_last_one_ended(reader: TextReader) -> None:
    clause = "one two three four five six seven eight nine ten"
    tracks = [TokenTrack(), TokenTrack()]
    for track in tracks:
        for word in clause.split():
            track.feed(f"{word} ", 1)
        track.feed("next", 1)
    (whole,) = tracks[0].take(clause, reader.read(clause))
    parts = tracks[1].take(clause, reader.read(clause, 20))
    assert len(parts) > 2 and list(dict.fromkeys(np.concatenate(parts).tolist())) == list(range(10))
    assert list(dict.fromkeys(whole.tolist())) == list(range(10))
    (after,) = tracks[1].take("next", reader.read("next"))
    assert set(after.tolist()) == {10}
