"""`python -m services.router` under cProfile; at its end it prints the functions by their own time."""

from __future__ import annotations

import cProfile
import os
import pstats
import sys

from services.router.__main__ import main

if __name__ == "__main__":
    profile = cProfile.Profile()
    status = profile.runcall(main)
    with open(os.environ.get("ROUTER_PROFILE", "/tmp/router.prof.txt"), "w") as out:
        pstats.Stats(profile, stream=out).sort_stats("tottime").print_stats(70)
    sys.exit(status)
