"""Every method of the contract has a bound of its message."""

from __future__ import annotations

from libs.common.rpc.access_table import LONG_METHODS, SHORT_METHODS, most_request_bytes
from tests.common.rpc.test_access_table import contract


def test_every_method_of_the_contract_is_short_or_long() -> None:
    methods = {f"/{service}/{name}" for service, names in contract().items() for name in names}
    assert methods == SHORT_METHODS | LONG_METHODS
    assert most_request_bytes("/slipstream.v1.RouterService/Generate") is None
