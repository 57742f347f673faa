"""Several answers to one prompt, which is computed once; by the asynchronous client.

python examples/python/choices.py [HOST:PORT]        default: 127.0.0.1:7000
"""

from __future__ import annotations

import asyncio
import sys

from slipstream import AsyncClient, Overloaded, SlipstreamError


async def main(endpoint: str) -> None:
    """Ask for three answers."""
    messages = [{"role": "user", "content": "Hello!"}]
    # A cluster without room names a pause; the client sends the request again after it, up to five times.
    async with AsyncClient(endpoint, max_retries=5) as client:
        try:
            reply = await client.chat(messages, n=3, temperature=0.8, seed=7, max_tokens=40)
        except Overloaded as error:
            sys.exit(f"no room, even now; next try in {error.retry_after_ms} ms")
    for number, choice in enumerate(reply.choices, 1):
        print(f"{number}. {choice.text} ({choice.finish_reason})")


if __name__ == "__main__":
    try:
        asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7000"))
    except SlipstreamError as error:
        sys.exit(f"{sys.argv[0]}: {error.message}")
