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
        "on a CUDA device: ahead = the next one begins before the tokens of the last are read; graphs = one "
        "launch a step; plain = one launch a program",
        default="plain",
        choices=("plain", "graphs", "ahead"),
    )
    draft_tokens: int = setting("most drafts for each sequence and step; 0 = none", default=8)
    drafts: str = setting(
        "auto: use drafts where they are measured to save time (text is the same either way)",
        default="auto",
        choices=("auto", "on", "off"),
    )
    draft_budget_ms: float = setting("longest wait of a step for the drafter, milliseconds", default=25.0)
    draft_export_bytes: int = setting(
        "draft features of a sequence from this size on go to a drafter by the KV transport",
        default=LEAST_EXPORTED_BYTES,
        least=1,
    )
    drafter: str = setting(
        "local: the draft head runs in this process; service: a drafter that discovery knows; HOST:PORT",
        default=SERVICE,
        check=check_drafter,
    )
