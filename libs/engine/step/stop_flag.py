"""A flag that aborts a forward pass: one thread sets it, the pass polls it, in C and in Python."""

from __future__ import annotations

import ctypes


class StepAborted(Exception):
    """The pass ended before its last layer because its flag was set; its results are discarded."""


class StopFlag:
    """A 32-bit word of memory. Any thread may set it; it stays set until it is cleared."""

    def __init__(self) -> None:
        self._word = ctypes.c_int32(0)
        self.address = ctypes.addressof(self._word)  # for C; valid as long as this object

    @property
    def is_set(self) -> bool:
        return bool(self._word.value)

    def set(self) -> None:
        self._word.value = 1

    def clear(self) -> None:
        self._word.value = 0
