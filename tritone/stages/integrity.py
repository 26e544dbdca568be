"""Integrity: the step between prefill and decode, the audit of all pools, and the report.

A hand-over passes only if its blocks are what it says they are, and only while every check that is on has run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tritone.deployment import Deployment
from tritone.integrity import IntegrityError
from tritone.integrity.audit import Auditor
from tritone.messages import Failure, Prefilled
from tritone.metrics import Metrics
from tritone.pools import CancelBoard, StaleBlocks, Views
from tritone.sizes import talker_that_speaks_in_codes

PAGE_POOLS = ("prefill_pages", "decode_pages")
HIDDEN_POOLS = ("prefill_hidden", "decode_hidden")
TALKER_POOL = "talker_pages"


class IntegrityStage:
    """Checks pool, epoch, bounds, tags, lengths and page size of every hand-over against the pools' own headers."""

    def __init__(self, deployment: Deployment, directory: Path, board: CancelBoard, metrics: Metrics) -> None:
        self._page_size = deployment.page_size
        self._views = Views(directory)
        self._board = board
        self._metrics = metrics
        self._mode = deployment.integrity.mode
        self._auditor: Auditor | None = None
        if self._mode != "off":
            self._auditor = Auditor(
                directory,
                PAGE_POOLS,
                HIDDEN_POOLS if deployment.voice else (),
                metrics,
                seconds=deployment.integrity.audit_seconds,
                lease_seconds=deployment.lease_seconds,
                spoken=(TALKER_POOL,) if talker_that_speaks_in_codes(deployment) is not None else (),
            )
            self._auditor.start()

    def stop(self) -> None:
        if self._auditor is not None:
            self._auditor.stop()

    def report(self) -> dict[str, Any]:
        """What was checked and found so far; JSON types only. Without checks only the mode."""
        return {"mode": self._mode} | (self._auditor.report() if self._auditor is not None else {})

    def check(self, prefilled: Prefilled, cancelled: bool) -> Prefilled:
        """The same hand-over, or a failure in its place; beats and failures pass."""
        if cancelled:
            self._board.post(prefilled.session)
        if prefilled.handoff is None or prefilled.request is None:
            return prefilled
        handoff, request = prefilled.handoff, prefilled.request
        if self._board.is_cancelled(prefilled.session):
            # Prefill may have taken the pages back: no fault of anybody's.
            self._views.release(handoff.pages, handoff.hidden)
            return Prefilled(request, prefilled.session, None, Failure("cancelled"))
        try:
            problem = self._auditor.problem() if self._auditor is not None else None
            if problem is not None:
                raise IntegrityError("checker", problem, "UNAVAILABLE")
            if handoff.page_size != self._page_size:
                raise StaleBlocks(f"page_size: prefill's is {handoff.page_size}, decode's is {self._page_size}")
            pages = -(-len(request.ids) // self._page_size)
            if len(handoff.pages.blocks) != pages:
                raise StaleBlocks(
                    f"{len(handoff.pages.blocks)} pages handed over for {len(request.ids)} tokens; expected {pages}"
                )
            for refs, pool in ((handoff.pages, PAGE_POOLS[0]), (handoff.hidden, HIDDEN_POOLS[0])):
                if refs is None:
                    continue
                if refs.pool != pool:
                    raise StaleBlocks(f"pool {refs.pool!r} handed over; expected {pool!r}")
                self._views.of(refs).check(refs)
        except StaleBlocks as stale:
            return self._refuse(prefilled, IntegrityError(stale.kind, stale.message))
        except IntegrityError as error:
            return self._refuse(prefilled, error)
        return prefilled

    def _refuse(self, prefilled: Prefilled, error: IntegrityError) -> Prefilled:
        assert prefilled.handoff is not None
        self._views.release(prefilled.handoff.pages, prefilled.handoff.hidden)
        self._metrics.count("tritone_requests_total", outcome="integrity")
        if self._auditor is not None:
            self._auditor.found(error.kind, error.message)
        return Prefilled(prefilled.request, prefilled.session, None, Failure("error", error.code, error.message))
