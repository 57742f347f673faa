"""Refusals of a worker's start that a start soon after seldom mends."""

from __future__ import annotations

import contextlib
import errno
import resource
import traceback
from collections.abc import Iterator

from libs.common.runtime.process_settings import ServiceSettings
from libs.common.runtime.settings import rows
from slipstream.errors import FailedPrecondition, InvalidArgument

# Settings that size a worker; a drafter has the size of its head.
_SIZES = ("memory_bytes", "kv_memory_bytes")
# Torch and the dynamic linker raise general classes; their messages have these words.
_WORDS = ("can't allocate memory", "out of memory", "cannot allocate memory")
# The linker says so of a library in a file system mounted noexec, too.
_NO_SEGMENT = "failed to map segment"


class ModelUnusable(FailedPrecondition):
    """The checkpoint cannot be loaded with these settings on this machine, now or at another start."""


@contextlib.contextmanager
def unusable_sizes(options: ServiceSettings) -> Iterator[None]:
    """Raise a refused setting and a lack of memory as ModelUnusable. A start soon after seldom mends them."""
    try:
        yield
    except InvalidArgument as error:
        raise ModelUnusable(options.named(error).message) from error
    except (MemoryError, OSError, RuntimeError, ImportError) as error:
        if not _is_out_of_memory(error):
            raise
        fields = [name for name in _SIZES if name in rows(type(options))] or ["draft_model"]
        refusal = InvalidArgument(", ".join(fields), _describe(error))
        raise ModelUnusable(options.named(refusal).message) from error


@contextlib.contextmanager
def unusable_models(options: ServiceSettings) -> Iterator[None]:
    """Raise the refusals of a load as ModelUnusable, too."""
    try:
        with unusable_sizes(options):
            yield
    except FailedPrecondition as error:
        raise ModelUnusable(error.message) from error


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on the host or on a device."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError | ImportError):
        words = (*_WORDS, _NO_SEGMENT) if _address_limit() is not None else _WORDS
        return any(word in str(error).lower() for word in words)
    return isinstance(error, MemoryError)


def _address_limit() -> int | None:
    """The bytes of memory that this process may map."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def _describe(error: BaseException) -> str:
    """What could not be allocated, and the limit of the process where it has one."""
    frames = traceback.extract_tb(error.__traceback__)
    what = (str(error) or f"no memory in {frames[-1].name if frames else 'the start'}").splitlines()[0]
    limit = _address_limit()
    return what if limit is None else f"{what} (ulimit -v: {limit} bytes)"
