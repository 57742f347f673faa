"""The credential of a caller with an API key, in the place of a token."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ApiKeyCredential:
    """One key, for any server: unlike a token it names none, so send it over TLS or to this machine."""

    key: str = field(repr=False)

    def tokens_for(self, endpoint: str) -> ApiKeyCredential:
        """The credential itself, because the key serves every endpoint."""
        return self

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata that authenticates a call."""
        return (("authorization", f"Bearer {self.key}"),)
