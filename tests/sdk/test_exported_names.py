"""What the clients' calls take, return and raise is a name of `slipstream`."""

from __future__ import annotations

import dataclasses

import pytest

import slipstream
import slipstream.batches.messages
import slipstream.jobs.messages
import slipstream.metering.usage
import slipstream.replies
import slipstream.responses.messages
from slipstream.errors import error_types

# Errors between the processes of a cluster, which no client gets.
_INTERNAL = {"FingerprintMismatch", "OutOfPages", "PrefixUnknown", "TransferError", "UnknownAddress"}


@pytest.mark.parametrize("name", sorted(error_types().keys() - _INTERNAL))
def test_each_error_that_a_client_gets_is_exported(name: str) -> None:
    assert name in slipstream.__all__
    assert getattr(slipstream, name) is error_types()[name]


@pytest.mark.parametrize(
    "module",
    [
        slipstream.batches.messages,
        slipstream.jobs.messages,
        slipstream.metering.usage,
        slipstream.replies,
        slipstream.responses.messages,
    ],
)
def test_each_record_of_a_module_is_exported(module: object) -> None:
    records = {name: kind for name, kind in vars(module).items() if dataclasses.is_dataclass(kind)}
    assert records
    for name, kind in records.items():
        assert name in slipstream.__all__
        assert getattr(slipstream, name) is kind
