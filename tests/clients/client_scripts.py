"""The scripts of all clients, the interpreters that run them, and the report that each prints."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
NODE_MODULES = HERE / "node" / "node_modules"
VENVS = ROOT / ".venv-clients"
RESULTS = HERE / "results.json"
SCENARIOS = ("chat", "stream", "tools", "structured", "errors", "usage")
# A script may load a large library on a busy machine.
SCRIPT_TIMEOUT_S = 200


@dataclass(frozen=True, slots=True)
class ClientScript:
    """A script below this folder, its argument, and the environment that runs it."""

    environment: str
    file: str
    argument: str = ""

    @property
    def name(self) -> str:
        """Such as run_openai-responses."""
        return "-".join(part for part in (self.environment, Path(self.file).stem, self.argument) if part)

    @property
    def is_set_up(self) -> bool:
        """Whether the environment exists: the script then runs, or its test fails."""
        return (NODE_MODULES if self.environment == "node" else VENVS / self.environment).is_dir()

    def command(self) -> list[str]:
        """The command line, or an empty list where the interpreter or its packages are missing."""
        if self.environment == "node":
            node = shutil.which("node")
            begin = [node, str(HERE / "node" / self.file)] if node and NODE_MODULES.is_dir() else []
        else:
            python = VENVS / self.environment / "bin" / "python"
            begin = [str(python), str(HERE / "python" / self.file)] if python.exists() else []
        return [*begin, *filter(None, [self.argument])] if begin else []

    def run(self, http: str) -> dict[str, Any]:
        """The report of a run against the HTTP API at host:port."""
        done = subprocess.run(
            self.command(),
            capture_output=True,
            text=True,
            timeout=SCRIPT_TIMEOUT_S,
            cwd=HERE,
            env={**os.environ, "SLIPSTREAM_HTTP": http, **_QUIET},
        )
        lines = done.stdout.strip().splitlines()
        assert done.returncode == 0 and lines, f"{self.name}: {done.stderr[-2000:]}"
        report: dict[str, Any] = json.loads(lines[-1])
        return report


# Libraries that would call home, or warn about a key that only their makers' services need.
_QUIET = {
    "OPENAI_API_KEY": "none",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGSMITH_TRACING": "false",
    "DO_NOT_TRACK": "1",
}
SCRIPTS = (
    ClientScript("openai3", "run_openai.py"),
    ClientScript("openai3", "run_openai_responses.py"),
    ClientScript("node", "run_openai.mjs"),
    ClientScript("node", "run_openai.mjs", "responses"),
    ClientScript("openai3", "run_anthropic.py"),
    ClientScript("openai2", "run_litellm.py"),
    ClientScript("openai2", "run_instructor.py"),
    ClientScript("openai3", "run_langchain.py"),
    ClientScript("openai3", "run_pydantic_ai.py"),
    ClientScript("openai3", "run_openai_agents.py"),
    ClientScript("openai3", "run_openai_agents.py", "responses"),
    ClientScript("node", "run_ai_sdk.mjs", "openai-compatible"),
    ClientScript("node", "run_ai_sdk.mjs", "openai-chat"),
    ClientScript("node", "run_ai_sdk.mjs", "openai"),
    ClientScript("node", "run_ai_sdk.mjs", "workers-ai"),
)
