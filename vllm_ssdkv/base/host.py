"""Resources of this machine: memory that may be used, room on a device, default places."""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vllm_ssdkv.base.sizes import GIB

DEFAULT_CAPACITY_LIMIT: Final = 64 * GIB
DEFAULT_DRAM_LIMIT: Final = 4 * GIB
CGROUP: Final = Path("/sys/fs/cgroup")
GROUPS: Final = Path("/proc/self/cgroup")
MEMINFO: Final = Path("/proc/meminfo")
STATUS: Final = Path("/proc/self/status")
NUMA_NODES: Final = Path("/sys/devices/system/node")
_CAP_IPC_LOCK: Final = 14


@dataclass(frozen=True, slots=True)
class _GroupFiles:
    """Names that a version of control groups has for a group's limits, use and page cache."""

    limits: tuple[str, ...]
    used: str
    reclaimable: tuple[str, ...]


_VERSION_1: Final = _GroupFiles(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_VERSION_2: Final = _GroupFiles(
    ("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file")
)


def is_block_device(path: str) -> bool:
    """Check whether ``path`` exists and is a raw block device."""
    try:
        return stat.S_ISBLK(Path(path).stat().st_mode)
    except OSError:
        return False


def default_root() -> Path:
    """Directory of the stores of users who name no device: ``$XDG_CACHE_HOME/ssdkv``.

    A relative ``XDG_CACHE_HOME`` is invalid and ignored (XDG Base Directory Specification 0.8).
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "ssdkv"


def existing_parent(path: Path) -> Path:
    """The path itself, or its nearest parent that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def lockable_memory(status: Path = STATUS) -> int | None:
    """Bytes that this process may lock: RLIMIT_MEMLOCK, or None where nothing limits it."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return limit
    masks = [int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")]
    # The capability CAP_IPC_LOCK is above the limit.
    return None if any(mask >> _CAP_IPC_LOCK & 1 for mask in masks) else limit


def nearby_cpus(cpus: Set[int], nodes: Path = NUMA_NODES) -> set[int]:
    """All CPUs of the NUMA node that holds these CPUs; those of the machine if none does.

    A thread is often bound to one CPU. Others that it starts inherit that, and need more.
    """
    every = set(range(os.cpu_count() or 1))
    for node in sorted(nodes.glob("node[0-9]*/cpulist")):
        try:
            held = _cpu_list(node.read_text())
        except (OSError, ValueError):
            continue
        if held and cpus <= held:
            return held
    return every


def _cpu_list(text: str) -> set[int]:
    """CPUs of a list as the kernel writes it, ``0-3,8``."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def free_bytes(path: Path) -> int:
    """Bytes an unprivileged user may still write below ``path`` (which need not exist yet).

    Raises:
        OSError: the file system does not answer.
    """
    status = os.statvfs(existing_parent(path))
    return status.f_bavail * status.f_frsize


def default_capacity(path: Path) -> int:
    """Bytes a device may hold when the user gives no capacity.

    A directory: a quarter of the free space (what our own data files there already occupy counts
    as free, so that a restart finds the same size), at most 64 GiB. A raw block device has no
    other user: all of it.

    Raises:
        OSError: the path cannot be examined.
    """
    if is_block_device(str(path)):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.lseek(fd, 0, os.SEEK_END)
        finally:
            os.close(fd)
    own = sum(entry.stat().st_blocks * 512 for entry in path.glob("rank*.data"))
    return min(DEFAULT_CAPACITY_LIMIT, (free_bytes(path) + own) // 4)


def _meminfo_available() -> int | None:
    for line in MEMINFO.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return None


def _memory_groups() -> Iterator[tuple[Path, _GroupFiles]]:
    """Control groups that this process is in and their ancestors, which also limit it."""
    try:
        lines = GROUPS.read_text().splitlines()
    except OSError:
        lines = ["0::/"]
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, files = (CGROUP / "memory", _VERSION_1) if controllers else (CGROUP, _VERSION_2)
        # A container may see its own group mounted as the root, and its name with the host's parts.
        names = [part for part in name.split("/") if part not in {"", ".."}]
        while names and not root.joinpath(*names).is_dir():
            del names[0]
        for depth in range(len(names) + 1):
            yield root.joinpath(*names[:depth]), files


def _group_available(group: Path, files: _GroupFiles) -> int | None:
    """Bytes left below the limits of one control group; None without a limit."""
    limits: list[int] = []
    for name in files.limits:
        try:
            limits.append(int((group / name).read_text()))
        except (OSError, ValueError):  # the root has no such file, and "max" is no limit
            continue
    if not limits:
        return None
    try:
        used = int((group / files.used).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    # The kernel takes pages of files back before it refuses memory: MemAvailable counts them, too.
    reclaimable = sum(int(stat.get(key, 0)) for key in files.reclaimable)
    return max(0, min(limits) - max(0, used - reclaimable))


def available_memory() -> int:
    """Bytes of memory that may be used without swapping, below the limits of all containers."""
    groups = [_group_available(group, files) for group, files in _memory_groups()]
    limits = [n for n in (_meminfo_available(), *groups) if n is not None]
    return min(limits) if limits else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


MOUNTS: Final = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True)
class Mount:
    """Mount that a path lies on."""

    point: str
    kind: str
    source: str


def _unescape(text: str) -> str:
    """Undo the octal escapes of mountinfo (blank, tab, newline, backslash)."""
    for code, character in ((r"\040", " "), (r"\011", "\t"), (r"\012", "\n"), (r"\134", "\\")):
        text = text.replace(code, character)
    return text


def mounts() -> list[Mount]:
    """All mounts of this process, see proc_pid_mountinfo(5). Later ones cover earlier ones."""
    found: list[Mount] = []
    for line in MOUNTS.read_text().splitlines():
        before, _, after = line.partition(" - ")
        point, (kind, source, *_) = before.split()[4], after.split()
        found.append(Mount(_unescape(point), kind, _unescape(source)))
    return found
