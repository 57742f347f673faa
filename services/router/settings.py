"""Settings of a router."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from libs.common.runtime.process_settings import ServiceSettings
from libs.common.runtime.settings import check_address, check_readable, setting
from libs.common.service_bounds import MAX_RUNNING_REQUESTS


def parse_region_ms(text: str) -> dict[str, float]:
    """`eu=0,us=80` by region. Raises ValueError with the reason."""
    distances: dict[str, float] = {}
    for item in filter(None, text.split(",")):
        name, _, ms = item.partition("=")
        try:
            distances[name] = float(ms)
        except ValueError:
            distances[name] = math.nan
        if not name or not 0.0 <= distances[name] < 1e6:
            raise ValueError(f"{item!r} is not NAME=MS")
    return distances


@dataclass(frozen=True)
class RouterSettings(ServiceSettings):
    """The settings of a router."""

    listen: str = setting(
        "address of the gRPC server; port 0 = any free one", default="127.0.0.1:7000", check=check_address
    )
    http: str = setting(
        "address of the HTTP server; port 0 = any free one", default="127.0.0.1:8000", check=check_address
    )
    model: Path = setting("checkpoint directory: tokenizer, config, name", check=check_readable)
    served_model_name: str | None = setting("name clients use", default=None, default_text="the directory's")
    region_ms: str = setting(
        "distance of each region, NAME=MS[,NAME=MS..]; 0 for others", default="", check=parse_region_ms
    )
    max_requests: int = setting("requests running at once", default=MAX_RUNNING_REQUESTS, least=1)
    api_keys: Path | None = setting(
        "file with lines `key tenant`; none = requests need no key", default=None, check=check_readable
    )
    processes: int = setting("router processes that share the ports", default=1, least=1)
    allow_pinning: bool = setting("honour x-slipstream-prefill: for demonstrations", default=False)
    child_of: int = setting(
        "pid of the process that started this one as one of several", default=0, is_hidden=True
    )
