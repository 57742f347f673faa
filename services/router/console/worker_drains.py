"""Drain and Undrain of a worker for a caller of the console."""

from __future__ import annotations

import logging
from contextlib import aclosing

from libs.common.cluster.discovery import Fleet
from libs.common.cluster.worker_record import Role
from services.router.operators.fleet_report import find_process
from services.router.operators.process_calls import ProcessCalls
from slipstream.bound import shown
from slipstream.errors import InvalidArgument, NotFound
from slipstream.rpc.caller_class import CallerIdentity
from slipstream.v1 import worker_pb2

log = logging.getLogger(__name__)

# A worker answers shortly before this, whether or not it still holds something.
DRAIN_ANSWER_S = 2.0
ROLES = (Role.PREFILL, Role.DECODE, Role.KVSTORE, Role.DRAFTER)


class WorkerDrains:
    """Drains workers by the calls that operators make through a router."""

    def __init__(self, members: Fleet, calls: ProcessCalls) -> None:
        self._members = members
        self._calls = calls

    async def set_draining(
        self, role: str, instance: str, *, draining: bool, caller: CallerIdentity, peer: str
    ) -> bool:
        """Drain or undrain a worker; returns its state then.

        Raises InvalidArgument, NotFound, and what the worker refuses.
        """
        if role not in ROLES:
            raise InvalidArgument("role", f"must be one of {', '.join(ROLES)}")
        worker = find_process(self._members.current, role, instance)
        if worker is None:
            raise NotFound(f"no {role} worker is called {shown(instance)}")
        verb = "drained" if draining else "undrained"
        log.warning("%s/%s is %s from the console by %s at %s", role, worker.instance, verb, caller, peer)
        name = "Drain" if draining else "Undrain"
        message = worker_pb2.DrainRequest() if draining else worker_pb2.UndrainRequest()
        answers = self._calls.call(
            worker,
            f"/slipstream.v1.WorkerService/{name}",
            message.SerializeToString(),
            operator=caller.name,
            timeout_s=DRAIN_ANSWER_S,
        )
        async with aclosing(answers):
            async for _ in answers:
                break
        return draining
