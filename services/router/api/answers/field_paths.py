"""The client's paths of the fields that a chat request has by other names. Pure.

The router checks every request as a chat request. An error of that check names a field that the body of
another API does not have, or has elsewhere.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from libs.common.http.failure import HttpFailure
from services.router.request.model_card import ModelCard
from services.router.request.types import GenerationRequest
from services.router.request.validation import check_values
from slipstream.errors import InvalidArgument

_MESSAGE = re.compile(r"messages\[(\d+)\](.*)")
_TOOL = re.compile(r"(tools\[\d+\])\.function\b(.*)")


class MessageSources:
    """The messages of a request, and the path in the body that each of them comes from."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.paths: list[str] = []

    def add(self, message: dict[str, Any], path: str) -> None:
        """Append a message."""
        self.messages.append(message)
        self.paths.append(path)


@dataclass(frozen=True, slots=True)
class FieldPaths:
    """`messages`: the path in the body of each message. `names`: other names of fields or last parts."""

    messages: Sequence[str]
    names: Mapping[str, str]

    def check(self, request: GenerationRequest, card: ModelCard) -> None:
        """Check the values of a request. Raises InvalidArgument with the path of the body, and NotFound."""
        try:
            check_values(request, card)
        except InvalidArgument as error:
            raise self.renamed(error) from None

    def in_failure(self, failure: HttpFailure) -> HttpFailure:
        """A failure that came later, from the prompt's length or the grammar, with the path of the body."""
        if failure.field is None or (path := self._path(failure.field)) == failure.field:
            return failure
        message = path + failure.message.removeprefix(failure.field)
        return dataclasses.replace(failure, field=path, message=message)

    def renamed(self, error: InvalidArgument) -> InvalidArgument:
        """The error with the path of the client's body."""
        path = self._path(error.field)
        return error if path == error.field else type(error)(path, error.reason)

    def _path(self, field: str) -> str:
        if field in self.names:
            return self.names[field]
        if (found := _MESSAGE.fullmatch(field)) is not None and int(found[1]) < len(self.messages):
            rest = found[2].removeprefix(".")
            rest = self.names.get(rest, rest)
            return f"{self.messages[int(found[1])]}.{rest}" if rest else self.messages[int(found[1])]
        if (found := _TOOL.fullmatch(field)) is not None:
            rest = found[2].removeprefix(".")
            rest = self.names.get(rest, rest)
            return f"{found[1]}.{rest}" if rest else found[1]
        return field
