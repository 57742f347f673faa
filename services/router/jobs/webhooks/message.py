"""One webhook as Standard Webhooks has it: headers, signature, and when to try again. Pure."""

from __future__ import annotations

import base64
import hashlib
import hmac

from services.router.jobs.webhooks.policy import signing_key

_FIRST_RETRY_S, _LONGEST_RETRY_S = 5.0, 3600.0


def webhook_headers(message_id: str, body: bytes, secret: str, *, now_s: float) -> dict[str, str]:
    """The headers of one delivery. The timestamp is that of the try, as receivers refuse old ones."""
    timestamp = str(int(now_s))
    signed = b".".join([message_id.encode(), timestamp.encode(), body])
    digest = hmac.new(signing_key(secret), signed, hashlib.sha256).digest()
    return {
        "content-type": "application/json",
        "webhook-id": message_id,
        "webhook-timestamp": timestamp,
        "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
    }


def webhook_retry_s(tries: int, jitter: float) -> float:
    """The pause after `tries` tries; `jitter` in [0, 1] scales it to between a half and the whole."""
    longest_s: float = min(_FIRST_RETRY_S * 4.0 ** min(max(tries - 1, 0), 8), _LONGEST_RETRY_S)
    return longest_s * (0.5 + jitter / 2)
