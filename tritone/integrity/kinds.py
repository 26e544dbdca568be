"""What can be wrong, by name; and the error that ends a request with it."""

from __future__ import annotations

from tritone.errors import TritoneError

KINDS: dict[str, str] = {
    "stale_tag": "a page was freed or given to someone else while a sequence held it, or its tag was overwritten",
    "page_table": "a sequence's list of pages is not the one it was given",
    "out_of_range": "a page number outside the pool",
    "double_hold": "a page held by two sequences without the prefix cache",
    "content": "the bytes of a handed-over or finished page are not those that were written",
    "handover": "a hand-over that does not fit the request, the pool, or a lease that is over",
    "epoch": "the pool's process has ended, or made the pool anew",
    "transfer": "handed-over pages that did not arrive in time",
    "checker": "a check that is on did not run",
    "table": "a pool's tags or lease words contradict each other, seen from outside",
}
"""The kinds of a mismatch, in the order of the ledger's words."""


class IntegrityError(TritoneError):
    """Ends one request. The message begins with ``integrity: <kind>:``."""

    code = "INTERNAL"

    def __init__(self, kind: str, message: str, code: str | None = None) -> None:
        if kind not in KINDS:
            raise ValueError(f"kind: {kind!r} is unknown; allowed: {', '.join(KINDS)}")
        # A stage that died is being started again: asking once more helps.
        super().__init__(f"integrity: {kind}: {message}", "UNAVAILABLE" if kind == "epoch" else code)
        self.kind = kind
