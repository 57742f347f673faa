"""A drafter whose head hangs ends in time, and says that it did not end in order."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from libs.common.runtime.exit_codes import HUNG

WAIT_S = 100.0
# The head of a drafter that is ready takes a batch, and hangs in it if the process is asked so.
DRAFTER = """
import asyncio, sys, threading
import numpy as np
from libs.common.cluster.worker_record import Role
from libs.engine.core.fake_head import FakeHead
from libs.engine.step.draft_head import ContextRows
from libs.worker.engine import model_thread
from libs.worker.process.process import run_worker
from libs.worker.process.settings import WorkerSettings
from services.drafter import app
from services.drafter.batcher import DraftWork

model_thread.MODEL_STOP_S = 0.5
began = threading.Event()

class Head(FakeHead):
    hangs = False

    def extend_batch(self, rows):
        if self.hangs:
            began.set()
            threading.Event().wait()
        super().extend_batch(rows)

class Drafter(app.DrafterApp):
    async def open(self, endpoint, discovery, stop):
        await super().open(endpoint, discovery, stop)
        Head.hangs = sys.argv[1] == "hangs"
        rows = ContextRows("s", 0, np.ones(8, np.uint32), np.ones((8, 8), np.float32))
        answered = asyncio.Event()
        self._batcher.submit(DraftWork([rows], [], [1], lambda _: answered.set()))
        await (asyncio.to_thread(began.wait) if Head.hangs else answered.wait())
        asyncio.get_running_loop().call_soon(stop)

app.FakeHead = Head
options = WorkerSettings(
    instance="drafter-0", listen="127.0.0.1:0", admin_http="127.0.0.1:0", engine="fake", transport="socket"
)
sys.exit(run_worker(Role.DRAFTER, options, lambda: Drafter(options)))
"""


@pytest.mark.parametrize(("head", "status"), [("works", 0), ("hangs", HUNG)])
def test_the_status_says_whether_the_head_ended(head: str, status: int) -> None:
    command = [sys.executable, "-c", textwrap.dedent(DRAFTER), head]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == status, done.stderr
    assert "drafter-0 stops" in done.stderr
    said = "the drafter thread did not end within 0.5 s" in done.stderr
    why = "while parts of it hang: drafter in " in done.stderr
    assert (said, why) == (head == "hangs",) * 2, done.stderr
