"""The file of `slipstream jobs submit`: one body a line, or the lines of OpenAI's batch files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.bound import shown
from slipstream.errors import InvalidArgument
from slipstream.jobs.messages import index_in

# Fields of a job that the command's flags state, the same for all lines.
_FLAGS = {
    "path": "--path",
    "group_id": "--group",
    "idempotency_key": "--group",
    "expires_ms": "--expires-s",
    "retention_ms": "--retention-s",
    "webhook": "--webhook",
}


@dataclass(frozen=True, slots=True)
class BodyFile:
    """The bodies of a file, their references and lines. A reference is a custom_id, or a line's number."""

    file: Path
    bodies: list[dict[str, Any]]
    references: list[str]
    lines: list[int]

    def refusal(self, error: InvalidArgument) -> InvalidArgument:
        """A router's error by the line of its body, or by the flag that states the field for all lines."""
        if (place := index_in(error.field)) is None:
            return error
        index, field, is_in_body = place
        if not is_in_body and field in _FLAGS:
            unit = ", in milliseconds" if field.endswith("_ms") else ""  # the flag is in seconds
            return InvalidArgument(_FLAGS[field], error.reason + unit)
        return InvalidArgument("FILE", f"{self.file}: line {self.lines[index]}: {field}: {error.reason}")


def read_bodies(file: Path, path: str) -> BodyFile:
    """The bodies for the endpoint `path`.

    Raises InvalidArgument for a file that cannot be read, a line of OpenAI's that is not for `path`, and two
    with one `custom_id`.
    """
    found = BodyFile(file, [], [], [])
    seen: dict[str, int] = {}
    for number, line in enumerate(_lines(file), start=1):
        if not line.strip():
            continue
        parsed = _parsed(file, number, line)
        reference = str(number)
        if "custom_id" in parsed and isinstance(parsed.get("body"), dict):
            _check_batch_line(file, number, parsed, path)
            reference = str(parsed["custom_id"])
            if (first := seen.setdefault(reference, number)) != number:
                reason = f"lines {first} and {number} have the same custom_id {shown(reference)}"
                raise InvalidArgument("FILE", f"{file}: {reason}")
            parsed = parsed["body"]
        found.bodies.append(parsed)
        found.references.append(reference)
        found.lines.append(number)
    if not found.bodies:
        raise InvalidArgument("FILE", f"{file}: has no bodies")
    return found


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8-sig").split("\n")  # a JSON text may have other line breaks
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "is not UTF-8"
        raise InvalidArgument("FILE", f"{file}: {why}") from None


def _parsed(file: Path, number: int, line: str) -> dict[str, Any]:
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise InvalidArgument("FILE", f"{file}: line {number} is no JSON object")
    return parsed


def _check_batch_line(file: Path, number: int, line: Mapping[str, Any], path: str) -> None:
    for name, wanted in (("method", "POST"), ("url", path)):
        if line.get(name, wanted) != wanted:
            reason = f"{name} must be {wanted}, not {shown(line[name])}"
            hint = "; --path names the endpoint of all lines" if name == "url" else ""
            raise InvalidArgument("FILE", f"{file}: line {number}: {reason}{hint}")
