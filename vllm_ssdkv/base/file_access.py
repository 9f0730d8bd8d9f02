"""File access: files and directories that are their owner's, or that a group shares."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from pathlib import Path
from typing import Final

PRIVATE: Final = 0o600
SHARED: Final = 0o660


def file_mode(directory: Path) -> int:
    """Mode of a file in this directory: :data:`SHARED` where the directory is a group's.

    The group may write to it, and nobody else may enter or new files get its group, as in a volume
    of Kubernetes with ``fsGroup``.

    Raises:
        OSError: as ``stat``.
    """
    mode = directory.stat().st_mode
    is_group = mode & stat.S_IWGRP and (mode & stat.S_ISGID or not mode & stat.S_IRWXO)
    return SHARED if is_group else PRIVATE


def create_file(path: Path, flags: int) -> int:
    """Make a file that only its owner can use, or also the group of a directory that a group
    shares, whatever the umask is. Returns its descriptor.

    Raises:
        OSError: as ``open`` with O_EXCL.
    """
    fd = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, PRIVATE)
    try:
        if file_mode(path.parent) == SHARED:
            os.fchmod(fd, SHARED)
    except BaseException:
        os.close(fd)
        raise
    return fd


def create_directory(path: Path) -> None:
    """Make a directory, with access as :func:`create_file` gives it to files.

    Raises:
        OSError: as ``mkdir``; its parent must be there.
    """
    path.mkdir(mode=0o700)
    if file_mode(path.parent) == SHARED:
        path.chmod(stat.S_ISGID | 0o770)


def why_refused(path: Path, error: OSError) -> str:
    """Say why the system refused this path: where permissions did, whose it is and the remedy."""
    reason = error.strerror or str(error)
    if error.errno not in {errno.EACCES, errno.EPERM}:
        return reason
    place = path
    while True:
        try:
            status = place.stat()
            break
        except OSError:
            if place == place.parent:
                return reason
            place = place.parent
    mine, mode = os.geteuid(), stat.S_IMODE(status.st_mode)
    if status.st_uid == mine:
        return f"{reason}: {place} has mode {mode:04o}"
    return (
        f"{reason}: {place} belongs to {_user(status.st_uid)} and {_group(status.st_gid)}, mode "
        f"{mode:04o}, and this process is {_user(mine)}; run it as {_user(status.st_uid)}, or "
        f"share it by a group that both are in: `chgrp -R GROUP DIR && chmod -R g+rwX DIR && "
        "find DIR -type d -exec chmod g+s {} +`"
    )


def _user(uid: int) -> str:
    try:
        return f"uid {uid} ({pwd.getpwuid(uid).pw_name})"
    except KeyError:
        return f"uid {uid}"


def _group(gid: int) -> str:
    try:
        return f"gid {gid} ({grp.getgrgid(gid).gr_name})"
    except KeyError:
        return f"gid {gid}"
