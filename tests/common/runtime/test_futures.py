"""A future that ends as another one did."""

from __future__ import annotations

import asyncio

import pytest

from libs.common.runtime.futures import pass_outcome


def two() -> tuple[asyncio.Future[int], asyncio.Future[int]]:
    loop = asyncio.get_running_loop()
    return loop.create_future(), loop.create_future()


async def test_a_result_an_error_and_a_cancel_are_passed_on() -> None:
    ended, waiting = two()
    ended.set_result(1)
    pass_outcome(ended, waiting)
    assert waiting.result() == 1
    ended, waiting = two()
    ended.set_exception(ValueError("no"))
    pass_outcome(ended, waiting)
    with pytest.raises(ValueError, match="no"):
        waiting.result()
    ended, waiting = two()
    ended.cancel()
    pass_outcome(ended, waiting)
    assert waiting.cancelled()


async def test_a_future_that_has_ended_stays_as_it_is() -> None:
    ended, waiting = two()
    waiting.cancel()
    ended.set_exception(ValueError("seen, so that asyncio logs nothing"))
    pass_outcome(ended, waiting)
    assert waiting.cancelled()
