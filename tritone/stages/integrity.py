"""Integrity: the step between prefill and decode. A hand-over passes only if its blocks are what it says they are."""

from __future__ import annotations

from pathlib import Path

from tritone.deployment import Deployment
from tritone.errors import TritoneError
from tritone.messages import Failure, Prefilled
from tritone.metrics import Metrics
from tritone.pools import CancelBoard, StaleBlocks, Views

PAGE_POOL = "prefill_pages"
HIDDEN_POOL = "prefill_hidden"


class IntegrityStage:
    """Checks pool, epoch, bounds, tags, lengths and page size of every hand-over against the pools' own headers."""

    def __init__(self, deployment: Deployment, directory: Path, board: CancelBoard, metrics: Metrics) -> None:
        self._page_size = deployment.page_size
        self._views = Views(directory)
        self._board = board
        self._metrics = metrics

    def check(self, prefilled: Prefilled, cancelled: bool) -> Prefilled:
        """The same hand-over, or a failure in its place; beats and failures pass."""
        if cancelled:
            self._board.post(prefilled.session)
        if prefilled.handoff is None or prefilled.request is None:
            return prefilled
        handoff, request = prefilled.handoff, prefilled.request
        try:
            if handoff.page_size != self._page_size:
                raise StaleBlocks(f"page_size: prefill's is {handoff.page_size}, decode's is {self._page_size}")
            pages = -(-len(request.ids) // self._page_size)
            if len(handoff.pages.blocks) != pages:
                raise StaleBlocks(
                    f"{len(handoff.pages.blocks)} pages handed over for {len(request.ids)} tokens; expected {pages}"
                )
            for refs, pool in ((handoff.pages, PAGE_POOL), (handoff.hidden, HIDDEN_POOL)):
                if refs is None:
                    continue
                if refs.pool != pool:
                    raise StaleBlocks(f"pool {refs.pool!r} handed over; expected {pool!r}")
                self._views.of(refs).check(refs)
        except TritoneError as error:
            self._views.release(handoff.pages, handoff.hidden)
            self._metrics.count("tritone_requests_total", outcome="integrity")
            failure = Failure("error", "INTERNAL", f"integrity: {error.message}")
            return Prefilled(request, prefilled.session, None, failure)
        return prefilled
