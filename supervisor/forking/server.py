"""A process that has imported the services' modules, and forks a service for each request.

    python -m supervisor.forking.server MODULE...       # standard input: the socket of the requests

A service is forked twice, and the process between ends at once. So the supervisor, as the subreaper, becomes
the service's parent: it reads the exit status, and its end kills the service. The end of this process changes
nothing for services. This process ends when the supervisor closes the socket or ends.

Only one thread runs here, because a fork copies no other thread and keeps the locks that others hold.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import setproctitle

from supervisor.exec_guard import die_with_parent
from supervisor.forking.messages import MAX_MESSAGE_BYTES, PID, RUN, BranchServer, Request, StartService

_MAX_FILES = 3
_ADOPTION_POLL_S = 0.0005


@dataclass(frozen=True, slots=True)
class ForkedService:
    """The request that the forked process serves, its socket to the supervisor, and its parent until then."""

    request: StartService
    handshake: socket.socket
    parent_pid: int


class ServiceEnd:
    """Ends a forked service behind its exit handlers, without destroying its modules.

    The interpreter would visit each object of the modules, and so copy each page that the fork shares with
    this server. That is 0.4 s of processor time for a worker with torch.
    """

    def __init__(self) -> None:
        """Exit handlers run in reverse: every later one runs before."""
        self.code: int | None = None  # of a service that ends in order
        atexit.register(self._exit)

    def run(self, service: ForkedService) -> None:
        """Run the service. An end by an error, or by words, is left to the interpreter, which prints them."""
        try:
            run_service(service)
            self.code = 0
        except SystemExit as end:
            if end.code is None or isinstance(end.code, int):
                self.code = end.code or 0
            raise

    def _exit(self) -> None:
        if self.code is None:
            return
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # an error leaves the end to the interpreter, which has a status for it
        os._exit(self.code & 0xFF)


def main() -> None:
    """Serve requests; in a forked service, run it. The service's exit ends this function by SystemExit."""
    end = ServiceEnd()  # before all modules that register handlers
    control = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # else a branch would keep this socket open
    preload(sys.argv[1:])
    service = serve(control)
    if service is not None:
        end.run(service)


def preload(modules: Sequence[str]) -> None:
    """Import modules. One that fails is left to the service, which says why."""
    gc.disable()  # a collection here would only cost time
    for name in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    # runpy warns of a main module that is imported already, and runs it again in any case.
    for name in modules:
        sys.modules.pop(name, None)
    gc.collect()
    gc.freeze()  # a collection in a service writes to each object that it visits, and so copies its page


def serve(control: socket.socket) -> ForkedService | None:
    """Fork for each request until the socket ends. Returns the service in a forked process, else None."""
    decode = msgspec.json.Decoder(Request).decode
    while True:
        message, files, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, _MAX_FILES)
        if not message:
            return None
        request = decode(message)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # branches that ended
                pass
        # A failed fork closes the files, and the supervisor sees that.
        with contextlib.suppress(OSError):
            if isinstance(request, BranchServer):
                server_pid = os.getpid()
                if os.fork() == 0:
                    die_with_parent(server_pid)
                    control.close()
                    control = socket.socket(fileno=files[0])
                    preload(request.modules)
                    continue
            elif (service := _fork_service(request, files)) is not None:
                control.close()
                return service
        for file in files:
            os.close(file)


def _fork_service(request: StartService, files: list[int]) -> ForkedService | None:
    """Fork twice. Returns the service in the second child, and None in this process."""
    if between := os.fork():
        os.waitpid(between, 0)
        return None
    between = os.getpid()
    try:
        if os.fork():
            os._exit(0)
    except OSError:
        os._exit(1)
    source, output, handshake = files
    os.dup2(source, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(source)
    os.close(output)
    return ForkedService(request, socket.socket(fileno=handshake), between)


def run_service(service: ForkedService) -> None:
    """Become the service: what `python -m MODULE ARGUMENTS` does after its start."""
    request = service.request
    os.setsid()
    while os.getppid() == service.parent_pid:
        time.sleep(_ADOPTION_POLL_S)
    die_with_parent(request.supervisor_pid)
    with service.handshake as handshake:
        handshake.sendall(PID.pack(os.getpid()))
        if handshake.recv(1) != RUN:
            os._exit(1)  # the supervisor gave this start up
    for name in request.unset_variables:
        os.environ.pop(name, None)
    os.environ.update(request.set_variables)
    _name_process(request)
    _draw_new_seeds()
    gc.enable()
    sys.argv = ["-m", *request.arguments]
    runpy.run_module(request.module, run_name="__main__", alter_sys=True)


def _name_process(request: StartService) -> None:
    """Show the command line that the service would have, and the interpreter's name."""
    with open("/proc/self/comm", encoding="ascii") as file:
        name = file.read().rstrip()
    setproctitle.setproctitle(" ".join([sys.executable, "-m", request.module, *request.arguments]))
    with open("/proc/self/comm", "w", encoding="ascii") as file:
        file.write(name)


def _draw_new_seeds() -> None:
    """Seed numpy's generator again. Python's `random` does so by itself, and torch begins at a constant."""
    if (generators := sys.modules.get("numpy.random")) is not None:
        generators.seed()


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as of a process in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    main()
