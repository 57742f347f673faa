"""Settings of a decode worker."""

from __future__ import annotations

from dataclasses import dataclass

from libs.common.runtime.settings import check_peers, setting
from libs.common.worker_bounds import LEAST_EXPORTED_BYTES
from libs.worker.process.settings import EngineSettings

LOCAL, SERVICE = "local", "service"


def check_drafter(text: str) -> None:
    """Raises ValueError for what is no place of the draft head."""
    if text not in ("", LOCAL, SERVICE):
        try:
            check_peers(text)
        except ValueError:
            raise ValueError(f"must be {LOCAL}, {SERVICE} or HOST:PORT, not {text!r}") from None


@dataclass(frozen=True)
class DecodeSettings(EngineSettings):
    """The settings of a decode worker."""

    decode_steps: str = setting(
        "CUDA: graphs = one launch a step; ahead = also before the last step's tokens are read (docs/gpu.md)",
        default="plain",
        choices=("plain", "graphs", "ahead"),
    )
    draft_tokens: int = setting("most drafts for each sequence and step; 0 = none", default=8)
    drafts: str = setting(
        "auto = where drafts are measured to save time",
        default="auto",
        choices=("auto", "on", "off"),
    )
    draft_budget_ms: float = setting("longest wait of a step for the drafter", default=25.0)
    draft_export_bytes: int = setting(
        "size from which draft features go by the KV transport",
        default=LEAST_EXPORTED_BYTES,
        least=1,
    )
    drafter: str = setting(
        "local: in this process; service: a drafter of the cluster; or HOST:PORT",
        default=SERVICE,
        check=check_drafter,
    )
