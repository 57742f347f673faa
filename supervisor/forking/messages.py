"""The messages of the supervisor to a fork server: one JSON message a datagram, with open files beside it."""

from __future__ import annotations

import struct
from collections.abc import Mapping

import msgspec

# A service's own pid, which it sends before it runs, and the answer that lets it run.
PID = struct.Struct("<i")
RUN = b"r"
MAX_MESSAGE_BYTES = 128 << 10
# Services read these variables when they run. MC_ are Mooncake's, which no fork server imports. All others
# may matter to the libraries that are imported.
_READ_AT_RUN = (
    *("SLIPSTREAM_", "MC_", "PYTEST_"),
    *("OTEL_EXPORTER_", "OTEL_BSP_", "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"),
)


class StartService(msgspec.Struct, frozen=True, tag="start"):
    """Fork a service. Three files come with it: its input, its output, and a socket to the supervisor."""

    supervisor_pid: int
    module: str
    arguments: tuple[str, ...]
    set_variables: dict[str, str]
    unset_variables: tuple[str, ...]


class BranchServer(msgspec.Struct, frozen=True, tag="branch"):
    """Fork a fork server that imports more modules. One file comes with it: its socket of requests."""

    modules: tuple[str, ...]


Request = StartService | BranchServer


def environment_change(
    old: Mapping[str, str], new: Mapping[str, str]
) -> tuple[dict[str, str], tuple[str, ...]] | None:
    """Variables to set and to unset so that `old` becomes `new`; None if only a new interpreter reads all."""
    to_set = {name: text for name, text in new.items() if old.get(name) != text}
    to_unset = tuple(name for name in old if name not in new)
    if all(name.startswith(_READ_AT_RUN) for name in (*to_set, *to_unset)):
        return to_set, to_unset
    return None
