"""The prefix cache: full pages of KV, found again by the tokens they were computed from. No torch.

A tree whose edges are the tokens of one page, with one root for each salt. Children are looked up in a dict by the bytes
of their token ids, so every hit compares hash and ids, and two prefixes share a page only where salt and all tokens up to
its end are the same. From the page of its first medium on, a prompt shares only with those of the very same media. The pool
keeps the pages: it counts holders, caches a kept page that nobody holds, and says when it takes one back.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Protocol

from tritone.engine.sequence import Sequence


class Pages(Protocol):
    """What scheduler and prefix cache need of a page pool."""

    on_evict: Callable[[int], None]

    @property
    def total(self) -> int: ...
    @property
    def available(self) -> int: ...
    def allocate(self, count: int) -> list[int]: ...
    def share(self, blocks: list[int]) -> None: ...
    def free(self, blocks: list[int]) -> object: ...
    def keep(self, block: int) -> None: ...
    def evict_all(self) -> None: ...


def page_key(tokens: list[int], foreign: int, digest: str = "") -> bytes:
    """The key of a page under its parent; ``digest`` where the prompt's media begin in it. Python hashes bytes with a secret
    of the process, so nobody can make two prompts collide on purpose; if two do, comparing them tells them apart."""
    return array("q", [foreign, *tokens]).tobytes() + digest.encode()


def salt_key(salt: str) -> bytes:
    return salt.encode("utf-8", "surrogatepass")


class _Node:
    """A prefix that ends with a page; ``page`` is None while only longer prefixes are cached."""

    __slots__ = ("children", "key", "page", "parent")

    def __init__(self, parent: _Node | None, key: bytes) -> None:
        self.parent = parent
        self.key = key
        self.page: int | None = None
        self.children: dict[bytes, _Node] = {}

    def child(self, key: bytes) -> _Node:
        found = self.children.get(key)
        if found is None:
            found = self.children[key] = _Node(self, key)
        return found


class PrefixCache:
    """``mixed``: KV from another engine differs from what this one computes, so a page is also known by how many of its
    tokens came from there; an answer then never depends on what happened to be cached."""

    def __init__(self, pages: Pages, page_size: int, *, mixed: bool = False) -> None:
        self._pages = pages
        self._page_size = page_size
        self._mixed = mixed
        self._root = _Node(None, b"")
        """Its children are the roots of the salts."""
        self._nodes: dict[int, _Node] = {}
        pages.on_evict = self._forget

    def __len__(self) -> int:
        return len(self._nodes)

    def pages(self) -> set[int]:
        return set(self._nodes)

    def match(self, sequence: Sequence) -> list[int]:
        """The pages of the longest cached beginning, with a hold on each; one token at least is left to compute."""
        found: list[int] = []
        node = self._root.children.get(salt_key(sequence.salt))
        if node is None:
            return found
        for key in self._keys(sequence, (len(sequence.tokens) - 1) // self._page_size):
            node = node.children.get(key)
            if node is None or node.page is None:
                break
            found.append(node.page)
        self._pages.share(found)
        return found

    def enter(self, sequence: Sequence) -> None:
        """Take in the full pages of what ``sequence`` has computed. Where the cache has the same page already, it keeps
        its own, and the sequence's stays the sequence's alone."""
        full = sequence.computed // self._page_size
        if full <= sequence.entered:
            return
        sequence.entered = full
        node = self._root.child(salt_key(sequence.salt))
        for page, key in zip(sequence.pages, self._keys(sequence, full), strict=False):
            node = node.child(key)
            if node.page is None:
                node.page = page
                self._nodes[page] = node
                self._pages.keep(page)

    def clear(self) -> None:
        """Forget every page that no sequence holds."""
        self._pages.evict_all()

    def _keys(self, sequence: Sequence, count: int) -> list[bytes]:
        size, keys, media = self._page_size, sequence.keys, sequence.media
        for begin in range(len(keys) * size, count * size, size):
            foreign = min(max(sequence.foreign - begin, 0), size) if self._mixed else 0
            digest = media.digest if media is not None and begin <= media.begins < begin + size else ""
            keys.append(page_key(sequence.tokens[begin : begin + size], foreign, digest))
        return keys[:count]

    def _forget(self, page: int) -> None:
        node: _Node | None = self._nodes.pop(page)
        assert node is not None
        node.page = None
        while node is not None and node.parent is not None and node.page is None and not node.children:
            del node.parent.children[node.key]
            node = node.parent
