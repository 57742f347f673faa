"""RouterService over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import grpc

from libs.common import service_bounds
from libs.common.rpc.access import Metadata
from libs.common.rpc.access_table import METHOD_CLASSES
from services.router.admission.tenant_shares import TextShares
from services.router.api.access_log import AccessLog, AccessRecord
from services.router.api.api_keys import ApiKeys
from services.router.api.http.piece_stream import PIECE_BYTES
from services.router.api.responses.operations import ResponseOperations
from services.router.api.rpc.call_reader import CallReader
from services.router.api.rpc.call_record import given_id, note_failure, request_id_of, trailing_id
from services.router.api.rpc.callers import Callers, Context
from services.router.api.rpc.generate import GenerateMethod
from services.router.api.rpc.listings import ListMethods
from services.router.api.rpc.token_methods import TokenMethods
from services.router.api.rpc.usage_method import UsageMethod
from services.router.execution.request_manager import RequestManager
from services.router.execution.sessions import Sessions
from services.router.request.model_card import ModelCard
from services.router.workers.fleet import RouterFleet
from slipstream import errors
from slipstream.v1 import router_pb2

SERVICE_NAME = "slipstream.v1.RouterService"

# Their answers say what is stored: a refused one would be sent again.
_WITH_EFFECT = frozenset({"SubmitJobs"})

UnaryMethod = Callable[[Any, Context], Awaitable[Any]]
UnaryMethods = Mapping[str, tuple[UnaryMethod, Any]]


class GrpcServer:
    """The RPCs, each with its line in the access log."""

    def __init__(
        self,
        manager: RequestManager,
        responses: ResponseOperations,
        *,
        fleet: RouterFleet,
        sessions: Sessions,
        card: ModelCard,
        keys: ApiKeys,
        sent: TextShares,
        access_log: AccessLog | None = None,
        write_stall_s: float = service_bounds.WRITE_STALL_S,
    ) -> None:
        """`sent` counts long answers until their clients have read them, as those over HTTP."""
        self._manager = manager
        self._sent = sent
        self._access_log = access_log or AccessLog()
        self.clock = self._access_log.clock
        clock = asyncio.get_running_loop().time
        self.callers = Callers(keys, clock)
        reader = CallReader(manager, responses)
        self.generation = GenerateMethod(
            manager, self.callers, reader, self._access_log, clock=clock, write_stall_s=write_stall_s
        )
        metering = manager.context.metering
        self._lists = ListMethods(
            self.callers,
            fleet=fleet,
            sessions=sessions,
            card=card,
            metering=metering,
            run_piece=manager.context.threads.run,
        )
        self.service_names: list[str] = []
        self._server: grpc.aio.Server | None = None
        self._usage = UsageMethod(metering, self.callers)
        self._tokens = TokenMethods(manager, self.callers, card, reader)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register RouterService. Methods without a message type parse the raw bytes themselves."""
        unary: UnaryMethods = {
            "Abort": (self._abort, router_pb2.AbortRequest),
            "Tokenize": (self._tokens.tokenize, None),
            "Detokenize": (self._tokens.detokenize, None),
            "ListModels": (self._lists.list_models, router_pb2.ListModelsRequest),
            "ListSessions": (self._lists.list_sessions, router_pb2.ListSessionsRequest),
            "GetUsage": (self._usage.get_usage, router_pb2.GetUsageRequest),
            "ListWorkers": (self._lists.list_workers, router_pb2.ListWorkersRequest),
        }
        handlers = self.unary_methods(unary)
        handlers["Generate"] = grpc.unary_unary_rpc_method_handler(
            self.generation.generate, request_deserializer=None, response_serializer=None
        )
        self._server = server
        self.add(SERVICE_NAME, handlers)

    def add(self, service_name: str, handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]) -> None:
        """Register a service, before the port serves. `add_to` comes first."""
        assert self._server is not None
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service_name, dict(handlers)),)
        )
        self.service_names.append(service_name)

    def name_call(self, context: Context) -> None:
        """Let the call have a request id, before its message is read: that of its metadata, or a new one."""
        context.set_trailing_metadata(trailing_id(given_id(context.invocation_metadata() or ())))

    def note_refused(
        self, metadata: Iterable[tuple[str, Any]], method: str, error: errors.SlipstreamError
    ) -> Metadata:
        """Log a call that was refused before it was read. Returns the answer's trailing metadata."""
        with self._access_log.call("grpc", _logged_name(method)) as record:
            record.request_id = given_id(metadata)
            note_failure(record, error)
        return trailing_id(record.request_id)

    def note_unread(self, method: str, context: Context, error: BaseException, *, began_s: float) -> None:
        """Log an accepted call whose message cannot be read. The handler logs the others."""
        record = AccessRecord("grpc", _logged_name(method))
        record.request_id = request_id_of(context)
        record.tenant = self.callers.tenant(context)
        record.key_name = self.callers.key_name(context)
        note_failure(record, error)
        self._state_limits(record, context)
        self._access_log.end(record, duration_s=self.clock() - began_s)

    def unary(self, name: str, method: UnaryMethod, kind: Any) -> grpc.RpcMethodHandler[Any, Any]:
        """The handler of a method with one answer. `kind` None: the method parses the raw bytes itself."""
        return grpc.unary_unary_rpc_method_handler(
            self._logged(name, method),
            request_deserializer=None if kind is None else kind.FromString,
            response_serializer=_serialize,
        )

    def unary_methods(self, methods: UnaryMethods) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        """The handlers of methods that are given by name, each as `unary` takes it."""
        return {name: self.unary(name, *method) for name, method in methods.items()}

    def stream(self, name: str, method: UnaryMethod, kind: Any) -> grpc.RpcMethodHandler[Any, Any]:
        """The handler of a method that writes its answers itself, and returns None."""
        return grpc.unary_stream_rpc_method_handler(
            self._logged(name, method), request_deserializer=kind.FromString, response_serializer=_serialize
        )

    def _logged(self, name: str, method: UnaryMethod) -> UnaryMethod:
        """A method with its line in the access log."""

        async def call(request: Any, context: Context) -> Any:
            with self._access_log.call("grpc", name) as record:
                record.request_id = request_id_of(context)
                try:
                    record.tenant = self.callers.tenant(context)
                    record.key_name = self.callers.key_name(context)
                    try:
                        response = await method(request, context)
                    finally:
                        self._state_limits(record, context)
                    if response is not None:  # of `stream`
                        self._count_sent(record.tenant, response, is_refusable=name not in _WITH_EFFECT)
                    record.status = "OK"
                    return response
                except BaseException as error:
                    note_failure(record, error)
                    raise
                finally:
                    del context  # see libs/common/rpc/serve.py

        return call

    def _state_limits(self, record: AccessRecord, context: Context) -> None:
        """Let the call's trailing metadata say what the limits of its key and tenant leave."""
        if (metering := self._manager.context.metering) is not None:
            limits = metering.limit_headers(record.tenant, self.callers.key_sha256(context))
            context.set_trailing_metadata((*trailing_id(record.request_id), *limits.items()))

    def _count_sent(self, tenant: str, response: Any, *, is_refusable: bool) -> None:
        """Count a long answer until it is read, or its call ends. Raises Overloaded for a refusable one.

        The handler's task, which runs this, writes the answer after it.
        """
        n_bytes = len(response) if isinstance(response, bytes) else response.ByteSize()
        handler = asyncio.current_task()
        if n_bytes > PIECE_BYTES and handler is not None:
            (self._sent.acquire if is_refusable else self._sent.add)(tenant, n_bytes)
            handler.add_done_callback(lambda _: self._sent.release(tenant, n_bytes))

    async def _abort(self, request: router_pb2.AbortRequest, context: Context) -> router_pb2.AbortResponse:
        await self._manager.abort(self.callers.tenant(context), request.request_id)
        return router_pb2.AbortResponse()


def _logged_name(method: str) -> str:
    """The method as it may stand in a log: a name that a client made up may not."""
    return method.rpartition("/")[2] if method in METHOD_CLASSES else "-"


def _serialize(message: Any) -> bytes:
    """A long answer is serialised already, off the event loop."""
    data: bytes = message if isinstance(message, bytes) else message.SerializeToString()
    return data
