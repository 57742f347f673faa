"""The file of --output that takes a new key: nobody but its owner can read it, and it replaces none."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from slipstream.errors import InvalidArgument

_FLAG = "--output"


@contextlib.contextmanager
def writing_key(path: Path, key: str) -> Iterator[None]:
    """Write the key before the block, which lets it count; where the block fails, the file goes.

    Raises InvalidArgument for a path that exists or cannot be written: afterwards nobody knows the key.
    """
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise InvalidArgument(_FLAG, f"{path} exists, and no key is replaced: name a new file") from None
    except OSError as error:
        raise InvalidArgument(_FLAG, f"{path} cannot be written: {error.strerror}") from None
    try:
        try:
            with os.fdopen(file, "w", encoding="ascii") as writer:
                os.fchmod(file, 0o600)  # the umask may take more
                writer.write(key + "\n")
                writer.flush()
                os.fsync(file)
        except OSError as error:
            raise InvalidArgument(_FLAG, f"{path} cannot be written: {error.strerror}") from None
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise
