"""Renders that processes of pytest share: kustomize takes half a second of processor time for each."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / ".cache" / "k8s-renders"

Objects = list[Mapping[str, Any]]


def kept_render(name: str, sources: str, make: Callable[[], Objects], folder: Path = FOLDER) -> Objects:
    """The render that a process made from the same `sources`, else what `make` returns.

    One process makes it while others wait. A render of other sources is replaced, a failed one is not kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name.replace('/', '.')}.json").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        objects = _read(file.read(), sources)
        if objects is None:
            objects = make()
            file.truncate(0)
            json.dump({"sources": sources, "objects": objects}, file)
        return objects


def _read(text: str, sources: str) -> Objects | None:
    """None for no render, for one of other sources, and for one that was cut off."""
    try:
        kept = json.loads(text)
    except ValueError:
        return None
    objects: Objects | None = kept["objects"] if kept["sources"] == sources else None
    return objects
