"""What a tenant has used, and the limits of its key.

python examples/python/usage.py [HOST:PORT [API-KEY-FILE]]        default: 127.0.0.1:7000, without a key
"""

from __future__ import annotations

import sys
from pathlib import Path

from slipstream import Client, QuotaExceeded, RateLimited, SlipstreamError, UsageRecord


def main(endpoint: str, api_key: str | None) -> None:
    """Ask one question, then for the sums of the last 30 days."""
    # Without retries, so that a limit shows at once. By default the client waits as the router names it.
    with Client(endpoint, api_key=api_key, max_retries=0) as client:
        try:
            client.chat([{"role": "user", "content": "Hello!"}], max_tokens=8)
        except RateLimited as error:
            print(f"too many requests or tokens: again in {error.retry_after_ms} ms")
        except QuotaExceeded as error:
            print(f"no money left: {error.message}")
        rows: list[UsageRecord] = client.usage(group_by=["model", "endpoint"])
    for row in rows:
        cost = f"{row.cost} {row.currency}" if row.currency else "no price"
        print(f"{row.model} {row.endpoint}: {row.requests} requests, {row.prompt_tokens} tokens, {cost}")


if __name__ == "__main__":
    try:
        main(
            sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7000",
            Path(sys.argv[2]).read_text().strip() if len(sys.argv) > 2 else None,
        )
    except SlipstreamError as error:
        sys.exit(f"{sys.argv[0]}: {error.message}")
