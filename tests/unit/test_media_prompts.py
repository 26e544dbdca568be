"""Prompts with media as data: what is refused, how steps cut them, and with whom they share pages."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tritone.engine.media import media_key, media_of, rotary_of
from tritone.engine.prefix_cache import PrefixCache
from tritone.engine.sequence import Sequence
from tritone.errors import InvalidArgument
from tritone.messages import MediaKey
from tritone.models.omni.prompt import MediaPrompt
from tritone.options import Sampling
from tritone.pools import FreeList

LENGTH = 20
PLACES = [5, 6, 7, 12, 13, 14, 15]
VISUAL = [12, 13, 14, 15]
SIZE = 4


def ints(values: Any) -> Any:
    return np.asarray(values, np.int32)


def prompt(**changes: Any) -> MediaPrompt:
    """A sound at 5 to 7, and an image of 2 by 2 at 12 to 15, whose positions are two less than its places."""
    positions = np.broadcast_to(np.arange(LENGTH), (3, LENGTH)).copy()
    positions[:, 12:16] = [[12] * 4, [12, 12, 13, 13], [12, 13, 12, 13]]
    positions[:, 16:] = [14, 15, 16, 17]
    given = MediaPrompt(
        ids=ints(range(100, 100 + LENGTH)), positions=ints(positions), delta=-2, places=ints(PLACES),
        embeddings=torch.arange(7.0)[:, None].repeat(1, 3), visual=ints(VISUAL),
        deepstack=torch.arange(8.0).view(2, 4, 1).repeat(1, 1, 3), digest=b"\x00\xff",
    )
    return replace(given, **changes)


def sequence(given: MediaPrompt | None, tokens: list[int] | None = None, media: MediaKey | None = None) -> Sequence:
    ids = tokens or (list(range(100, 100 + LENGTH)) if given is None else given.ids.tolist())
    key = media or (None if given is None else media_key(given))
    return Sequence(1, list(ids), LENGTH, Sampling(), 9, media=key, prompt=given)


def test_what_travels_with_a_prompt() -> None:
    assert media_key(prompt()) == MediaKey(-2, 5, "00ff")
    empty = {"places": ints([]), "visual": ints([]), "embeddings": torch.zeros(0, 3), "deepstack": torch.zeros(2, 0, 3)}
    assert media_key(prompt(**empty, positions=ints(np.broadcast_to(np.arange(LENGTH), (3, LENGTH))), delta=0)) is None


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"places": ints([5, 7, 6, 12, 13, 14, 15])}, "places"),
        ({"places": ints([5, 6, 7, 12, 13, 14, LENGTH])}, "places"),
        ({"visual": ints([-1, 13, 14, 15])}, "visual"),
        ({"embeddings": torch.zeros(6, 3)}, "embeddings"),
        ({"deepstack": torch.zeros(2, 3, 3)}, "deepstack"),
        ({"positions": ints(np.zeros((3, LENGTH - 1)))}, "positions"),
        ({"positions": ints(np.full((3, LENGTH), LENGTH))}, "positions"),
        ({"positions": ints(np.zeros((3, LENGTH)))}, "positions"),
        ({"delta": 1}, "delta"),
        ({"delta": -LENGTH}, "delta"),
    ],
)
def test_prompts_that_do_not_fit_together_are_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument, match=f"INVALID_ARGUMENT: {field}: "):
        media_key(prompt(**changes))


def test_steps_cut_media_anywhere() -> None:
    """Whatever a step takes, each token has the embedding, the added layers and the positions that the prompt gives it."""
    given, chance = prompt(), random.Random(2)
    answered = sequence(given, [*range(100, 100 + LENGTH), 1, 2, 3])
    elsewhere = sequence(None, media=MediaKey(-2, 5, "00ff"))  # in decode, which has the key alone
    elsewhere.tokens += [1, 2, 3]
    text = sequence(None)
    for _ in range(200):
        begin = chance.randint(0, LENGTH + 2)
        count = chance.randint(1, LENGTH + 3 - begin)
        spans = [(text, 3, 2), (answered, begin, count), (elsewhere, LENGTH + 1, 2)]
        rotary, media = rotary_of(spans), media_of(spans)
        assert rotary is not None and rotary.dtype == torch.int32
        prompted = given.positions[:, begin : begin + count]
        after = np.arange(max(begin, LENGTH), begin + count) - 2
        wanted = np.concatenate([prompted, np.broadcast_to(after, (3, len(after)))], axis=1)
        assert rotary.numpy().tolist() == np.concatenate(
            [np.broadcast_to([3, 4], (3, 2)), wanted, np.broadcast_to([LENGTH - 1, LENGTH], (3, 2))], axis=1
        ).tolist()
        inside = [n for n, place in enumerate(PLACES) if begin <= place < begin + count]
        if not inside:
            assert media is None
            continue
        assert media is not None
        assert media.rows.tolist() == [2 + PLACES[n] - begin for n in inside]
        assert media.embeddings[:, 0].tolist() == inside
        seen = [n for n, place in enumerate(VISUAL) if begin <= place < begin + count]
        if not seen:
            assert media.deepstack is None
            continue
        assert media.deepstack is not None
        assert media.deepstack.rows.tolist() == [2 + VISUAL[n] - begin for n in seen]
        assert media.deepstack.layers[:, :, 0].tolist() == [seen, [4 + n for n in seen]]


def test_text_alone_has_neither() -> None:
    spans = [(sequence(None), 0, 20)]
    assert rotary_of(spans) is None and media_of(spans) is None


@pytest.mark.parametrize(
    ("other", "shared"),
    [
        (sequence(prompt()), 4),
        (sequence(None, media=MediaKey(-2, 5, "00ff")), 4),
        (sequence(prompt(digest=b"\x00\xfe")), 1),
        (sequence(None), 1),
    ],
    ids=["the same", "its key alone", "other media", "text of the same ids"],
)
def test_pages_from_the_first_medium_on_are_shared_by_the_same_media_only(other: Sequence, shared: int) -> None:
    pages = FreeList(10)
    cache = PrefixCache(pages, SIZE)
    first = sequence(prompt())
    first.pages, first.computed = pages.allocate(5), LENGTH
    cache.enter(first)
    assert cache.match(other) == first.pages[:shared]
