"""Whether what requests share is what they took: an engine's tracker, the audit from outside, faults on purpose."""

from tritone.integrity.kinds import KINDS, IntegrityError
from tritone.integrity.ledger import Ledger
from tritone.integrity.tracker import NoTracker, Tracker

__all__ = ["KINDS", "IntegrityError", "Ledger", "NoTracker", "Tracker"]
