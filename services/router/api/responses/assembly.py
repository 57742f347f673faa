"""Stored responses as a part of a router."""

from __future__ import annotations

from collections.abc import Callable

from libs.database.database import Database
from services.router.admission.fair_threads import RunPiece
from services.router.api.responses.background import BackgroundResponses
from services.router.api.responses.operations import ResponseOperations
from services.router.api.responses.stored.store import ResponseStore
from services.router.jobs.store import JobStore
from services.router.request.model_card import ModelCard


def make_responses(
    card: ModelCard,
    database: Database | None,
    jobs: JobStore | None,
    *,
    ttl_s: float,
    wall_clock_s: Callable[[], float],
    run_piece: RunPiece,
) -> ResponseOperations:
    """What both APIs do with responses that stay for so long. Without a database nothing is stored."""
    if database is None or jobs is None:
        return ResponseOperations(None, None)
    store = ResponseStore(database, wall_clock_s=wall_clock_s, ttl_s=ttl_s, run_piece=run_piece)
    return ResponseOperations(store, BackgroundResponses(jobs, store, card))
