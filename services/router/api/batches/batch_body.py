"""The body that makes a batch. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from libs.common import batch_bounds
from services.router.api.batches.records import NewBatch
from services.router.api.json_body import Text, WholeNumber, decode_body, path_of
from slipstream import bounds


class _OutputExpiry(msgspec.Struct, forbid_unknown_fields=True):
    anchor: Text = None
    seconds: WholeNumber = None


class CreateBatchBody(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's fields."""

    input_file_id: Text = None
    endpoint: Text = None
    completion_window: Text = None
    metadata: dict[str, Any] | None = None
    output_expires_after: _OutputExpiry | None = None


_DECODER = msgspec.json.Decoder(CreateBatchBody)


def parse_batch(data: bytes, endpoints: Collection[str]) -> NewBatch:
    """The batch that a body asks for. Raises InvalidArgument naming the field, NotFound for no file's id."""
    body = decode_body(data, _DECODER, lambda _: None)
    check_names(body.input_file_id or "", body.endpoint or "", endpoints)
    if body.completion_window != "24h":
        raise batch_bounds.WINDOW.refused()
    return NewBatch(
        body.endpoint or "",
        body.input_file_id or "",
        checked_metadata(body.metadata or {}),
        _output_ttl_s(body.output_expires_after),
        body.completion_window,
    )


def check_names(input_file_id: str, endpoint: str, endpoints: Collection[str]) -> None:
    """Raise InvalidArgument for what names no file or none of the endpoints."""
    if not input_file_id:
        raise batch_bounds.INPUT_FILE.refused()
    if endpoint not in endpoints:
        raise batch_bounds.ENDPOINT.refused(endpoints=", ".join(sorted(endpoints)))


def _output_ttl_s(given: _OutputExpiry | None) -> int:
    if given is None:
        return batch_bounds.FILE_TTL_S
    if given.anchor != "created_at":
        raise batch_bounds.EXPIRES_ANCHOR.refused("output_expires_after.anchor")
    if given.seconds is None:
        raise bounds.TYPE.refused("output_expires_after.seconds", expected="a whole number")
    batch_bounds.EXPIRES.check(given.seconds, "output_expires_after.seconds")
    return given.seconds


def checked_metadata(given: Mapping[str, Any]) -> Mapping[str, str]:
    """The metadata of a batch. Raises InvalidArgument naming the first entry that does not fit."""
    bounds.METADATA.check(len(given))
    for key, value in given.items():
        if not isinstance(value, str):
            raise bounds.TYPE.refused(path_of("metadata", key), expected="a string")
        bounds.METADATA_KEY.check(len(key), path_of("metadata", key))
        bounds.METADATA_VALUE.check(len(value), path_of("metadata", key))
    return given
