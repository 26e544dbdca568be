"""Cuts text into clauses to be spoken while the text still arrives."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from tritone.models.voice.speakable import clean, is_silent

LONGEST_CLAUSE = 200
"""Characters after which a clause is cut at the last word boundary, whatever stands there."""

LONGEST_WORD = 100
"""Characters after which a run without a space is cut at its next sign that is no letter or figure, or after
half as many again."""


@dataclass(frozen=True)
class _Limits:
    pause: int  # words from which on a comma, semicolon, colon or dash ends the clause
    words: int  # words after which it ends before the next word, where that sounds right


# The first clause is short for an early first sound; each gives the next one the time to be longer.
_LIMITS = (_Limits(1, 7), _Limits(5, 15), _Limits(10, 29))
_BEFORE_STARTER = 3  # so many words earlier than `words`, a clause may end before a word that begins one
_PATIENCE = 4  # so many words later, it ends anywhere


def _word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


_STARTERS = _word_set("but so because although though while when where which who that if unless until since before after")
_BINDERS = _word_set(
    """a an the of to in on at for with from by into about over under and or but so because although while when
    where which who that if as than is are was were be been am has have had do does did will would can could should
    may might must not no very my your his her its our their this these those i you he she we they"""
)
_TITLES = _word_set(
    """mr mrs ms dr prof st mt ft gen gov sen rep capt lt col sgt cmdr rev hon pres supt cpl maj adm fr msgr
    messrs vs cf approx est dept univ ave blvd rd hwy ph.d eg ie viz al jr sr co corp bros"""
)
_BEFORE_NUMBER = _word_set(
    """no nos vol fig figs ch pp p eq sec art jan feb mar apr jun jul aug sep sept oct nov dec mon tue wed thu
    fri sat sun"""
)
_MAY_END = frozenset(["a.m", "p.m"])
_DOTTED = re.compile(r"(?:[^\W\d_]\.)+[^\W\d_]")
_OPENERS = "\"'“‘«([{*_~`<"
_CLOSERS = "\"'”’»)]}*_~`>"
_DASHES = frozenset(["-", "–", "—", "--"])


class ClauseSplitter:
    """Text in pieces -> clauses, each as soon as the first character after it has come.

    A clause ends at a line end (but not before a small letter: a wrapped line), at the end of a sentence, at
    a comma, semicolon, colon or dash when it is long enough, and otherwise at a word boundary when it grows
    too long; never inside a word or a number, save in a run of more than LONGEST_WORD characters without a
    space. The clauses are cleaned for speech (see `speakable.clean`); they hold every letter and figure of
    plain text, in order. Clauses with nothing to speak are left out. The text is taken a character at a time,
    so the clauses depend on the text alone and not on how it was cut.
    """

    def __init__(self) -> None:
        self._reset()

    def feed(self, delta: str) -> list[str]:
        """Takes further text; returns the clauses it completed."""
        clauses: list[str] = []
        for char in delta:
            if char.isspace():
                self._gap += char if len(self._gap) < LONGEST_CLAUSE else ""
            else:
                self._take(char, clauses)
        return clauses

    def flush(self) -> list[str]:
        """Ends the text; returns what was left, none or one clause. The next feed begins another text."""
        clauses: list[str] = []
        self._cut(len(self._raw), clauses)
        self._reset()
        return clauses

    def _reset(self) -> None:
        self._raw = ""  # of the clause in the making, to the end of its last word
        self._word_at = 0  # where the last word begins in it
        self._words = 0  # words complete in it, counting only those with a letter or figure
        self._binds = False  # whether the last word belongs to the one that follows
        self._gap = ""  # the white space after it
        self._line_start = True
        self._given = 0  # clauses of this text so far

    def _take(self, char: str, clauses: list[str]) -> None:
        if self._gap and not self._raw:
            self._line_start |= "\n" in self._gap
        elif self._gap:
            self._words += any(c.isalnum() for c in self._raw[self._word_at :])
            cut = self._boundary(char)
            if cut is not None:
                self._cut(cut, clauses)
            if self._raw:
                self._raw += self._gap
            self._word_at = len(self._raw)
        elif self._word_is_endless(char):
            self._cut(len(self._raw), clauses)
        self._gap = ""
        self._raw += char

    def _cut(self, at: int, clauses: list[str]) -> None:
        clause = clean(self._raw[:at], self._line_start)
        if clause:
            clauses.append(clause)
            self._given += 1
        kept = self._raw[at:].lstrip()
        self._line_start = not kept and "\n" in self._gap
        self._raw, self._word_at = kept, 0
        self._words = int(any(c.isalnum() for c in kept))
        self._binds = self._binds and bool(kept)

    def _boundary(self, following: str) -> int | None:
        """Where in _raw the clause ends, given the first character after the gap; None to go on."""
        here = len(self._raw)
        word = self._raw[self._word_at :]
        core = _core(word)
        newlines = self._gap.count("\n")
        if newlines > 1 or (newlines and not following.islower()):
            return here
        if not self._words:
            return None
        limits = _LIMITS[min(self._given, len(_LIMITS) - 1)]
        abbreviated = core.endswith(".") and self._is_abbreviation(core[:-1], following)
        if core.endswith((".", "!", "?", "…")) and not abbreviated:
            if not following.islower():
                return here
            pause = True
        else:
            pause = core.endswith((",", ";", ":", "—", "–")) or core in _DASHES
        in_number = following.isdigit() and core[:-1][-1:].isdigit()
        if pause and self._words >= limits.pause and not in_number:
            return here
        if here > LONGEST_CLAUSE:
            return self._word_at or here
        return self._word_limit(core, abbreviated, limits)

    def _word_limit(self, core: str, abbreviated: bool, limits: _Limits) -> int | None:
        """Cuts before the last word and not after it, so that no single word is left for the sentence's end."""
        name = core.strip(_OPENERS + ",;:").lower()
        bound, self._binds = self._binds, abbreviated or name in _BINDERS or core[-1:].isdigit()
        before = self._words - 1
        enough = limits.words - (_BEFORE_STARTER if name in _STARTERS else 0)
        if before >= (limits.words + _PATIENCE if bound else enough):
            return self._word_at or None
        return None

    def _is_abbreviation(self, word: str, following: str) -> bool:
        """True when the full stop after the word does not end a sentence."""
        word = word.lstrip(_OPENERS)
        if word.isdigit():  # "1. First": the number of a list item
            return self._line_start and self._words == 1
        lower = word.lower()
        if lower in _MAY_END:
            return not following.isupper()
        if lower in _BEFORE_NUMBER and following.isdigit():
            return True
        return lower in _TITLES or bool(_DOTTED.fullmatch(word)) or (len(word) == 1 and word.isalpha())

    def _word_is_endless(self, char: str) -> bool:
        length = len(self._raw) - self._word_at
        if length < LONGEST_WORD or unicodedata.combining(char):
            return False
        return length >= LONGEST_WORD * 3 // 2 or not char.isalnum()


def _core(word: str) -> str:
    """The word without closing quotes, brackets, marks and emoji at its end."""
    end = len(word)
    while end and (word[end - 1] in _CLOSERS or is_silent(word[end - 1])):
        end -= 1
    return word[:end]
