"""xxhash's C functions, from the library that Python's `xxhash` uses.

The Python module takes no secret and holds the interpreter's lock. A self-test compares digests once.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import xxhash

SECRET_BYTES = 192  # of xxh3's own secret


class Hash128(ctypes.Structure):
    """The library's 128-bit digest."""

    _fields_ = (("low", ctypes.c_uint64), ("high", ctypes.c_uint64))

    def canonical(self) -> bytes:
        """The digest's 16 bytes, big-endian."""
        return bytes(self.high.to_bytes(8, "big") + self.low.to_bytes(8, "big"))


@dataclass(frozen=True, slots=True)
class Xxh3:
    """XXH3's 128-bit functions with a secret, those for the running processor where the library has them."""

    plain: Any
    whole: Any
    create: Any
    free: Any
    reset: Any
    update: Any
    digest: Any
    default_secret: bytes  # with it the functions give plain xxh3


@cache
def xxh3() -> Xxh3:
    """The functions. Raises OSError or AttributeError where the library does not give Python's digests."""
    library = ctypes.CDLL(library_path())
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    own = ctypes.create_string_buffer(SECRET_BYTES)
    _declared(library.XXH3_generateSecret_fromSeed, None, pointer, ctypes.c_uint64)(own, 0)
    found = Xxh3(
        plain=_declared(_dispatched(library, "XXH3_128bits"), Hash128, pointer, size),
        whole=_declared(
            _dispatched(library, "XXH3_128bits_withSecret"), Hash128, pointer, size, pointer, size
        ),
        create=_declared(library.XXH3_createState, pointer),
        free=_declared(library.XXH3_freeState, ctypes.c_int, pointer),
        reset=_declared(library.XXH3_128bits_reset_withSecret, ctypes.c_int, pointer, pointer, size),
        update=_declared(_dispatched(library, "XXH3_128bits_update"), ctypes.c_int, pointer, pointer, size),
        digest=_declared(library.XXH3_128bits_digest, Hash128, pointer),
        default_secret=own.raw,
    )
    _check(found)
    return found


def library_path() -> str:
    """The file of the library."""
    module: Any = xxhash._xxhash  # type: ignore[attr-defined]
    return str(module.__file__)


def address_of(function: Any) -> int:
    """The address of a C function, for another library."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _dispatched(library: Any, name: str) -> Any:
    """The function that dispatches by processor, where the library has one."""
    return getattr(library, f"{name}_dispatch", None) or getattr(library, name)


def _declared(function: Any, result: Any, *arguments: Any) -> Any:
    function.restype, function.argtypes = result, list(arguments)
    return function


def _check(functions: Xxh3) -> None:
    cut, secret = 700, functions.default_secret
    state = functions.create()
    try:
        for n_bytes in (0, 12, 100, 200, 1255):
            data = bytes(number % 251 for number in range(n_bytes))
            functions.reset(state, secret, len(secret))
            functions.update(state, data[:cut], len(data[:cut]))
            functions.update(state, data[cut:], len(data[cut:]))
            plain, keyed = functions.plain(data, n_bytes), functions.whole(data, n_bytes, secret, len(secret))
            found = {each.canonical() for each in (functions.digest(state), plain, keyed)}
            if found != {xxhash.xxh3_128_digest(data)}:
                raise OSError("xxhash's library does not give its digests")
    finally:
        functions.free(state)
