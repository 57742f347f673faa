"""Runs the coroutine of a command."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


def run_async(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run a coroutine to its end. The import of asyncio takes a fifth of a command that needs none."""
    import asyncio

    return asyncio.run(work)
