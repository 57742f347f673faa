"""Files of secrets that others may read: what to say of one, and the command that mends it.

Kubernetes mounts a Secret as root's, readable by the pod's group (fsGroup), and root may give a file to the
group of a service. Neither is said: root has chosen that group, and the process has no other way to read.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Collection
from pathlib import Path

_OTHERS = stat.S_IROTH | stat.S_IWOTH
_GROUP = stat.S_IRGRP | stat.S_IWGRP


def exposure(path: Path) -> str:
    """The warning for a file that other users may read or write; empty for a private or missing file."""
    try:
        found = path.stat()
    except OSError:
        return ""  # the code that reads the file raises the error
    groups = {os.getegid(), *os.getgroups()}
    return exposure_of(path, found, user=os.geteuid(), groups=groups)


def exposure_of(path: Path, found: os.stat_result, *, user: int, groups: Collection[int]) -> str:
    """`exposure` for a process of this user and these groups. Nothing of a folder, a pipe or a terminal."""
    if not stat.S_ISREG(found.st_mode):
        return ""
    is_given = found.st_uid == 0 and found.st_gid in groups and not found.st_mode & stat.S_IWGRP
    exposed = found.st_mode & (_OTHERS if is_given else _OTHERS | _GROUP)
    if not exposed:
        return ""
    who = "every user of this machine" if exposed & _OTHERS else f"the group {found.st_gid}"
    may = "read" if exposed & (stat.S_IROTH | stat.S_IRGRP) else "change"
    mode = stat.S_IMODE(found.st_mode)
    return f"{path} has mode {mode:04o}, and {who} may {may} it: {_mend(path, found, user, groups)}"


def _mend(path: Path, found: os.stat_result, user: int, groups: Collection[int]) -> str:
    """The command after which only the process may read the file."""
    name = shlex.quote(str(path))
    if found.st_uid == user:
        return f"chmod 0600 {name}"
    if found.st_uid == 0:
        group = found.st_gid if found.st_gid in groups else min(groups)
        own = "" if group == found.st_gid else f"chgrp {group} {name} && "
        return f"{own}chmod 0640 {name}"
    return f"chown {user} {name} && chmod 0600 {name}"
