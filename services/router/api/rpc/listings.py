"""ListModels, ListSessions and ListWorkers: what the router knows, as far as the caller may see it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from libs.common import list_bounds
from libs.common.cluster.placement_record import Placement, SessionId
from services.router.admission.fair_threads import RunPiece
from services.router.api.rpc.callers import Callers, Context, is_operator
from services.router.execution.sessions import Sessions
from services.router.metering.metering import Metering, price_of
from services.router.request.model_card import ModelCard
from services.router.workers.fleet import RouterFleet
from slipstream.enum_names import ROLES
from slipstream.v1 import router_pb2


class ListMethods:
    """The methods. None of them waits, but for a thread."""

    def __init__(
        self,
        callers: Callers,
        *,
        fleet: RouterFleet,
        sessions: Sessions,
        card: ModelCard,
        metering: Metering | None,
        run_piece: RunPiece,
    ) -> None:
        self._callers = callers
        self._metering = metering
        self._fleet = fleet
        self._sessions = sessions
        self._card = card
        self._run_piece = run_piece

    async def list_models(
        self, request: router_pb2.ListModelsRequest, context: Context
    ) -> router_pb2.ListModelsResponse:
        """ListModels."""
        response = router_pb2.ListModelsResponse()
        price = price_of(self._metering)
        for name in self._card.names:
            model = response.models.add(
                id=name,
                max_context_tokens=self._card.max_context_tokens,
                created_unix_s=self._card.created_unix_s,
            )
            if price is not None:
                model.price.currency = price.currency
                model.price.input_pico = price.input_pico
                model.price.cached_input_pico = price.cached_input_pico
                model.price.output_pico = price.output_pico
        return response

    async def list_sessions(self, request: router_pb2.ListSessionsRequest, context: Context) -> bytes:
        """ListSessions: the caller's own where there are several tenants.

        Returns the ListSessionsResponse as a thread has serialised it. Raises InvalidArgument.
        """
        tenant = self._callers.tenant(context)
        shown = None if self._callers.sees_all_tenants() else tenant
        list_bounds.SESSIONS_LIMIT.check(request.limit)
        found, last = await self._sessions.page(
            shown,
            after=_read_cursor(request.after),
            limit=request.limit or list_bounds.SESSIONS_PAGE,
            run_piece=partial(self._run_piece, tenant),
        )
        return await self._run_piece(tenant, partial(_encode_sessions, found, last.key if last else ""))

    async def list_workers(
        self, request: router_pb2.ListWorkersRequest, context: Context
    ) -> router_pb2.ListWorkersResponse:
        """ListWorkers: operators see the endpoints."""
        shows_endpoints = is_operator()
        return router_pb2.ListWorkersResponse(
            workers=[
                router_pb2.WorkerView(
                    role=ROLES.value(link.worker.role),
                    instance=link.worker.instance,
                    endpoint=link.worker.endpoint if shows_endpoints else "",
                    ready=link.ready,
                    report_age_ms=max(0, int(link.report_age_s * 1e3)),
                    tokens_in_flight=link.tokens_in_flight,
                    incarnation=link.worker.incarnation,
                )
                for link in self._fleet.links()
            ]
        )


def _read_cursor(after: str) -> SessionId | None:
    try:
        return SessionId.from_key(after) if after else None
    except ValueError:
        raise list_bounds.SESSIONS_AFTER.refused() from None


def _encode_sessions(page: Sequence[tuple[SessionId, Placement]], next_cursor: str) -> bytes:
    response = router_pb2.ListSessionsResponse(
        next=next_cursor,
        sessions=[
            router_pb2.SessionPlacement(
                tenant=session.tenant,
                session=session.session,
                kvstore=placement.kvstore,
                prefill_worker=placement.prefill,
                decode_worker=placement.decode,
                blocks=placement.block_count,
                tail_hash=placement.tail_hash,
                epoch=placement.epoch,
            )
            for session, placement in page
        ],
    )
    return response.SerializeToString()
