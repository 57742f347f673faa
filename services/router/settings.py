"""Settings of a router."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from libs.common.runtime.process_settings import ServiceSettings
from libs.common.runtime.settings import setting
from libs.common.service_bounds import MAX_RUNNING_REQUESTS


def parse_region_ms(text: str) -> dict[str, float]:
    """`eu=0,us=80` by region. ValueError, saying why, for anything else."""
    distances: dict[str, float] = {}
    for item in filter(None, text.split(",")):
        name, equals, ms = item.partition("=")
        if not name or not equals or not 0.0 <= float(ms) < 1e6:
            raise ValueError(f"--region-ms: {item!r} is not NAME=MS")
        distances[name] = float(ms)
    return distances


@dataclass(frozen=True)
class RouterSettings(ServiceSettings):
    """What a router is given."""

    listen: str = setting("address of the gRPC server; port 0 = any free one", default="127.0.0.1:7000")
    http: str = setting("address of the HTTP server; port 0 = any free one", default="127.0.0.1:8000")
    model: Path = setting("checkpoint directory: tokenizer, config, name")
    served_model_name: str | None = setting("name clients use", default=None, default_text="the directory's")
    region_ms: str = setting("NAME=MS[,NAME=MS..]: the way to each region; others are 0 away", default="")
    max_requests: int = setting("requests running at once", default=MAX_RUNNING_REQUESTS)
    api_keys: Path | None = setting("file with lines `key tenant`; none = requests need no key", default=None)
    processes: int = setting("router processes that share the ports", default=1)
    allow_pinning: bool = setting("honour x-slipstream-prefill: for demonstrations", default=False)
    child_of: int = setting(
        "pid of the process that started this one as one of several", default=0, is_hidden=True
    )
