"""The order in which the processes of a cluster restart. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


def restart_waves(processes: Iterable[tuple[str, str]]) -> list[list[str]]:
    """The processes, given as (role, name), that leave together: the first of each tier, then the second,
    and so on. Pure.

    A tier of several processes never loses more than one. One of each tier at a time is quicker than one
    process at a time. A process starts for seconds, during which it uses one core at most.
    """
    waves: list[list[str]] = []
    n_of_role: Counter[str] = Counter()
    for role, name in processes:
        number = n_of_role[role]
        n_of_role[role] += 1
        waves += [[]] * (number == len(waves))
        waves[number] = [*waves[number], name]
    return waves


def skipped_line(name: str) -> str:
    """What a rolling restart says of a process that an operator has drained."""
    return f"skipped {name}: it is drained; `slipstream undrain {name}` lets it take work again"
