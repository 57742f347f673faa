"""An answer as it arrives, and what it took.

python examples/python/stream.py [HOST:PORT[,HOST:PORT]]        default: 127.0.0.1:7000
"""

from __future__ import annotations

import sys

from slipstream import Client, DeadlineExceeded, Event, SlipstreamError


def main(endpoints: str) -> None:
    """Print the pieces, then the usage."""
    messages = [{"role": "user", "content": "Hello!"}]
    # Given several routers, a stream that loses one goes on at the next with the same text.
    with Client(endpoints) as client:
        stream = client.stream_chat(messages, temperature=0.0, max_tokens=40, timeout_s=120)
        try:
            event: Event
            for event in stream:
                print(event.text, end="", flush=True)
        except DeadlineExceeded:
            sys.exit("\nnot in time; this is what arrived: " + stream.reply.text)
    reply = stream.reply  # whole now
    assert reply.usage is not None
    print(f"\n{reply.usage.completion_tokens} tokens, {reply.finish_reason}")


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7000")
    except SlipstreamError as error:
        sys.exit(f"{sys.argv[0]}: {error.message}")
