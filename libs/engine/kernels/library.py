"""Loads the compiled kernels: the variant for the level of x86-64 and the units that this processor has.

The wheel's build and editable installs compile every variant (`server/native_build.py`). This module only
loads one.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from functools import cache
from pathlib import Path

from slipstream.errors import FailedPrecondition

log = logging.getLogger(__name__)

LIBRARY_DIR = Path(__file__).parent
_LOWEST_LEVEL = 2
_BF16_LEVEL = 4
_IS_X86 = platform.machine().lower() in ("x86_64", "amd64")


@cache
def load_library(level: int | None = None, *, bf16: bool = False, amx: bool = True) -> ctypes.CDLL:
    """Load the kernels for this processor, or those of a lower `level` of x86-64.

    With `bf16`, products of bf16 and INT4 weights round activations to bf16 where the processor has a unit
    for that: AMX_BF16, unless `amx` is false, else AVX512_BF16. Where the system refuses the first, a line
    of the log says so. Raises FailedPrecondition when the kernels are missing, or this processor cannot run
    them.
    """
    if not _IS_X86:
        return _open("_kernels_generic.so")
    supported = processor_level()
    if bf16 and level is None and has_bf16_unit():
        if amx and (errno := -_ask_for_amx()) > 0:
            log.warning(
                "the kernel refuses AMX to this process (arch_prctl: %s): products take AVX512_BF16",
                os.strerror(errno),
            )
        return _open(f"_kernels_x86_64_v4_{'amx' if amx and can_use_amx() else 'bf16'}.so")
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


def has_bf16_unit() -> bool:
    """Whether this machine multiplies pairs of bf16 values (AVX512_BF16)."""
    return processor_level() == _BF16_LEVEL and bool(
        _open(f"_kernels_x86_64_v{_LOWEST_LEVEL}.so").ss_processor_has_bf16()
    )


def can_use_amx() -> bool:
    """Whether this machine multiplies tiles of bf16 values (AMX_BF16), and this process may.

    From this call on, the process and its forks have the right to. A process that they exec asks again.
    """
    return _ask_for_amx() == 1


def _ask_for_amx() -> int:
    """1 where this process may use AMX_BF16, 0 where the machine lacks it, -errno where it is refused."""
    if not has_bf16_unit():
        return 0
    return int(_open(f"_kernels_x86_64_v{_LOWEST_LEVEL}.so").ss_processor_use_amx())


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
