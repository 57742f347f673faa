"""Bounds what the JSON of a request costs to parse, before it is parsed. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from libs.text.json_structure import is_nested_deeper, structure_bytes
from slipstream import bounds


def check_structure(texts: Sequence[tuple[str, bytes]]) -> None:
    """Bound the structure of JSON texts together, and the depth of each.

    Raises InvalidArgument naming the field of one.
    """
    most = bounds.MAX_STRUCTURE_BYTES
    if sum([len(text) for _, text in texts]) > most:  # a shorter text needs no split into strings
        n_bytes = 0
        for field, text in texts:
            n_bytes += structure_bytes(text, at_most=most - n_bytes)
            if n_bytes > most:
                raise bounds.BODY_STRUCTURE.refused(field)
    for field, text in texts:
        if is_nested_deeper(text, bounds.MAX_JSON_DEPTH):
            raise bounds.BODY_DEPTH.refused(field)
