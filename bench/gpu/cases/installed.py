"""Which optional packages this Python has."""

from __future__ import annotations

import importlib
import importlib.util

from bench.gpu.case import NotMeasured


def check_installed(package: str, install: str) -> str:
    """The version of a package. Raises NotMeasured when it is not installed."""
    if importlib.util.find_spec(package) is None:
        raise NotMeasured(f"{package} is not installed ({install})")
    return str(getattr(importlib.import_module(package), "__version__", "unknown"))
