"""`python -m services.router`, sampled each millisecond of its CPU time.

At its end it writes where the samples fell to the file that ROUTER_PROFILE names: by function with what it
called (`total`), and by function alone (`own`). Samples in gRPC's compiled code count for its caller.
"""

from __future__ import annotations

import collections
import os
import signal
import sys
from types import FrameType

from services.router.__main__ import main

_INTERVAL_S = 0.001
_LINES = 60


class Sampler:
    """Counts samples by function."""

    def __init__(self) -> None:
        self.samples = 0
        self.own: collections.Counter[str] = collections.Counter()
        self.total: collections.Counter[str] = collections.Counter()

    def take(self, _signal: int, frame: FrameType | None) -> None:
        """One sample of the main thread's stack."""
        self.samples += 1
        names: list[str] = []
        while frame is not None:
            code = frame.f_code
            names.append(f"{'/'.join(code.co_filename.split('/')[-2:])}:{code.co_qualname}")
            frame = frame.f_back
        self.own[names[0]] += 1
        self.total.update(set(names))

    def text(self) -> str:
        """The functions with most samples, in percent."""
        lines = [f"{self.samples} samples"]
        for title, counts in (("total", self.total), ("own", self.own)):
            lines.append(f"--- {title}, percent")
            lines += [
                f"{100 * count / max(self.samples, 1):6.2f}  {name}"
                for name, count in counts.most_common(_LINES)
            ]
        return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sampler = Sampler()
    signal.signal(signal.SIGPROF, sampler.take)
    signal.setitimer(signal.ITIMER_PROF, _INTERVAL_S, _INTERVAL_S)
    status = main()
    signal.setitimer(signal.ITIMER_PROF, 0)
    with open(os.environ.get("ROUTER_PROFILE", "router-profile.txt"), "w") as out:
        out.write(sampler.text())
    sys.exit(status)
