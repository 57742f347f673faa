"""The name of the user that runs a command."""

from __future__ import annotations

import getpass
import os
import re


def user_name() -> str:
    """The user that runs the command, as logs name it."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # an id without a name
        name = str(os.getuid())
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)[:64] or "operator"
