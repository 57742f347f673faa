"""The APIs beside OpenAI's completions: families of routes over HTTP, and services over gRPC."""

from __future__ import annotations

import asyncio
import time

from libs.database.database import Database
from services.router.api.anthropic.routes import PATH as MESSAGES_PATH
from services.router.api.anthropic.routes import MessagesRoutes
from services.router.api.batches.assembly import make_batches
from services.router.api.batches.endpoint import BatchEndpoints
from services.router.api.batches.rpc.service import BATCH_SERVICE_NAME, BatchService, batch_handlers
from services.router.api.formats import FORMATS
from services.router.api.http_server import HttpServer
from services.router.api.jobs.assembly import RouterJobs
from services.router.api.responses.operations import ResponseOperations
from services.router.api.responses.routes import PATH as RESPONSES_PATH
from services.router.api.responses.routes import ResponsesRoutes
from services.router.api.rpc.response_service import (
    RESPONSE_SERVICE_NAME,
    ResponseService,
    response_handlers,
)
from services.router.api.rpc.server import GrpcServer
from services.router.api.workers_ai.endpoint import RunEndpoints
from services.router.execution.request_manager import RequestManager
from services.router.request.model_card import ModelCard


def add_families(
    http: HttpServer,
    rpc: GrpcServer,
    manager: RequestManager,
    card: ModelCard,
    jobs: RouterJobs,
    responses: ResponseOperations,
    *,
    database: Database | None,
) -> list[asyncio.Task[None]]:
    """Add their routes and services, before the servers listen, and the formats that jobs may name.

    The tasks work until they are cancelled.
    """
    messages = MessagesRoutes(manager, http.reader, http.generation, card)
    routes = ResponsesRoutes(manager, http.reader, http.generation, card, responses)
    openai = {**FORMATS, RESPONSES_PATH: routes.format}
    jobs.formats.update({**openai, MESSAGES_PATH: messages.format})
    http.add(messages)
    http.add(routes)
    batches, runner = make_batches(manager, database, jobs.store, paths=jobs.formats, wall_clock_s=time.time)
    http.add(BatchEndpoints(manager, http.reader, batches, delivery=http.generation.delivery))
    run_piece, generation = manager.context.threads.run, http.generation
    service = BatchService(
        batches,
        rpc.callers,
        run_piece=run_piece,
        delivery=generation.delivery,
        write_stall_s=generation.write_stall_s,
    )
    rpc.add(BATCH_SERVICE_NAME, batch_handlers(service, rpc))
    shown = ResponseService(responses, rpc.callers, run_piece=run_piece)
    rpc.add(RESPONSE_SERVICE_NAME, response_handlers(shown, rpc))
    http.add(
        RunEndpoints(manager, http.reader, http.generation, jobs.store, formats=openai, models=http.models)
    )
    return [] if runner is None else [asyncio.create_task(runner.run(), name="batches")]
