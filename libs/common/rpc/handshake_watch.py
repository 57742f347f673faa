"""Notices a TLS port whose handshakes fail. gRPC completes them, and reports failures to no handler."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from libs.common.telemetry.paced_warnings import WARN_EVERY_S, PacedWarnings

# A caller whose handshakes fail connects again every few seconds; a single connection proves nothing.
_MIN_HANDSHAKES = 3


class HandshakeWatch:
    """Counts handshakes that begin, and calls. Warns when a while has the former only."""

    def __init__(self, warnings: PacedWarnings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._warnings = warnings
        self._clock = clock
        self._lock = threading.Lock()
        self._restart()

    def _restart(self) -> None:
        self._began_s, self._handshakes, self._calls = self._clock(), 0, 0

    def note_call(self) -> None:
        """A call arrived, so a handshake was completed."""
        self._calls += 1

    def note_handshake(self) -> None:
        """A handshake begins. gRPC's threads call this."""
        with self._lock:
            handshakes, calls = self._handshakes + 1, self._calls
            self._handshakes = handshakes
            if self._clock() - self._began_s < WARN_EVERY_S:
                return
            self._restart()
        if not calls and handshakes >= _MIN_HANDSHAKES:
            self._warnings.warn(
                "handshakes",
                f"{handshakes} connections began a TLS handshake and made no call: the certificates of "
                "callers are not signed by an authority in --tls-ca here, or --tls-certificate is not "
                "signed by one in theirs (connections that only probe the port look the same)",
            )
