"""The plain sampling numbers of a JSON body, by the names of SAMPLING_RANGES. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING

import msgspec

from services.router.api.json_body import Number, WholeNumber
from slipstream.sampling import SAMPLING_RANGES

if TYPE_CHECKING:

    class SamplingBody(msgspec.Struct):
        """One field for each of SAMPLING_RANGES."""
else:
    SamplingBody = msgspec.defstruct(
        "SamplingBody",
        [(name, WholeNumber if row.whole else Number, None) for name, row in SAMPLING_RANGES.items()],
    )
_values: Callable[[SamplingBody], tuple[float | None, ...]] = attrgetter(*SAMPLING_RANGES)
_OFF_TOP_K = -1  # of vLLM and SGLang; 0 here


def stated_numbers(body: SamplingBody) -> Mapping[str, float]:
    """The numbers that the body states."""
    return stated_of(dict(zip(SAMPLING_RANGES, _values(body), strict=True)))


def stated_of(values: Mapping[str, float | None]) -> Mapping[str, float]:
    """The numbers that are not null. A `top_k` of -1 is off, as 0 is."""
    given = {name: value for name, value in values.items() if value is not None}
    if given.get("top_k") == _OFF_TOP_K:
        given["top_k"] = 0
    return given
