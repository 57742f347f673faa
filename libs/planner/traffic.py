"""What a plan is made for: the mean request, and the time a token may take."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libs.common.fleet_bounds import MAX_TRACE_LINE_BYTES, MAX_TRACE_LINES
from slipstream.credentials.bounded_file import open_regular
from slipstream.errors import InvalidArgument

_FLAG = "--traffic"
# Blocks of the published traces (Mooncake): 512 tokens.
_TRACE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Traffic:
    """cached_tokens of a prompt's prompt_tokens are not computed. rate_per_s 0: not known."""

    prompt_tokens: float = 8192.0
    cached_tokens: float = 0.0
    output_tokens: float = 1024.0
    rate_per_s: float = 0.0

    @property
    def computed_tokens(self) -> float:
        return max(self.prompt_tokens - self.cached_tokens, 1.0)

    @property
    def decode_context_tokens(self) -> float:
        """The mean context of a decode step."""
        return self.prompt_tokens + self.output_tokens / 2


def read_trace(path: Path) -> Traffic:
    """The mean request of a trace in Mooncake's form; a block that was seen before counts as cached.

    The rate is of the time from the first request to the last one. Raises InvalidArgument, naming the line.
    """
    seen: set[Any] = set()
    prompts = outputs = cached = 0.0
    times_ms: list[int] = []
    for place, line in _lines(path):
        entry = _entry(line, place)
        prompts += entry["input_length"]
        outputs += entry["output_length"]
        times_ms.append(entry["timestamp"])
        cached += _cached_tokens(entry["hash_ids"], seen)
    if not times_ms:
        raise InvalidArgument(_FLAG, f"{path} has no request")
    n_requests, span_ms = len(times_ms), max(times_ms) - min(times_ms)
    return Traffic(
        prompt_tokens=prompts / n_requests,
        cached_tokens=min(cached, prompts) / n_requests,
        output_tokens=max(outputs / n_requests, 1.0),
        rate_per_s=n_requests / (span_ms / 1e3) if span_ms else 0.0,
    )


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """(file and number, line) of each line that is not blank. Raises InvalidArgument."""
    try:
        with open_regular(path) as file:
            if file.read(len(BOM_UTF8)) != BOM_UTF8:
                file.seek(0)
            number = 0
            while line := file.readline(MAX_TRACE_LINE_BYTES + 2):
                number += 1
                if number > MAX_TRACE_LINES:
                    raise InvalidArgument(_FLAG, f"{path} has more than {MAX_TRACE_LINES} lines")
                place = f"{path}, line {number}"
                if len(line.removesuffix(b"\n").removesuffix(b"\r")) > MAX_TRACE_LINE_BYTES:
                    raise InvalidArgument(_FLAG, f"{place}: has more than {MAX_TRACE_LINE_BYTES} bytes")
                if line.strip():
                    yield place, line
    except OSError as error:
        raise InvalidArgument(_FLAG, f"cannot read {path}: {error.strerror}") from error


def _entry(line: bytes, place: str) -> dict[str, Any]:
    try:
        entry = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise InvalidArgument(_FLAG, f"{place}: not UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(_FLAG, f"{place}: not JSON") from error
    if not isinstance(entry, dict):
        raise InvalidArgument(_FLAG, f"{place}: is not an object")
    for name in ("timestamp", "input_length", "output_length"):
        if type(entry.get(name)) is not int or not 0 <= entry[name] < 2**53:
            wrong = "is not" if name in entry else "is missing:"
            raise InvalidArgument(_FLAG, f"{place}: {name} {wrong} a whole number from 0 to 2^53 - 1")
    blocks = entry.setdefault("hash_ids", [])
    if not isinstance(blocks, list) or any(type(block) is not int for block in blocks):
        raise InvalidArgument(_FLAG, f"{place}: hash_ids is not a list of whole numbers")
    return entry


def _cached_tokens(blocks: list[int], seen: set[Any]) -> int:
    held = 0
    while held < len(blocks) and blocks[held] in seen:
        held += 1
    seen.update(blocks)
    return held * _TRACE_BLOCK_TOKENS
