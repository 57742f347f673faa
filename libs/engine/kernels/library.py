"""Loads the compiled kernels: the variant for the level of x86-64 that this processor has.

The wheel's build and editable installs compile every variant (`server/native_build.py`). This module only
loads one.
"""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from pathlib import Path

from slipstream.errors import FailedPrecondition

LIBRARY_DIR = Path(__file__).parent
_LOWEST_LEVEL = 2
_IS_X86 = platform.machine().lower() in ("x86_64", "amd64")


@cache
def load_library(level: int | None = None) -> ctypes.CDLL:
    """Load the kernels for this processor, or those of a lower `level` of x86-64.

    Raises FailedPrecondition when they are missing, or this processor cannot run them.
    """
    if not _IS_X86:
        return _open("_kernels_generic.so")
    supported = processor_level()
    wanted = supported if level is None else level
    if not _LOWEST_LEVEL <= wanted <= supported:
        raise FailedPrecondition(
            f"the compiled kernels need x86-64-v{max(wanted, _LOWEST_LEVEL)}, and this processor has "
            f"x86-64-v{supported}"
        )
    return _open(f"_kernels_x86_64_v{wanted}.so")


def processor_level() -> int:
    """The level of x86-64 that this machine supports, 1 to 4; 0 on another architecture."""
    if not _IS_X86:
        return 0
    return int(_open(f"_kernels_x86_64_v{_LOWEST_LEVEL}.so").ss_processor_level())


def _open(name: str) -> ctypes.CDLL:
    path = LIBRARY_DIR / name
    if not path.exists():
        raise FailedPrecondition(
            f"the compiled kernels are missing ({path}): reinstall slipstream-server, or run `make native` "
            "in a checkout"
        )
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise FailedPrecondition(f"the compiled kernels do not load: {error}") from None
