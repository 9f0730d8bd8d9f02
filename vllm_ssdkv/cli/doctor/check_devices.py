"""``ssdkv doctor``: can this directory or raw device hold a store, and how fast is it."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from vllm_ssdkv.base.host import (
    Mount,
    default_capacity,
    default_root,
    existing_parent,
    free_bytes,
    is_block_device,
    mounts,
)
from vllm_ssdkv.base.sizes import approximate_size
from vllm_ssdkv.cli.bench.measure import (
    MAX_BYTES,
    REQUEST_BYTES,
    Rates,
    measure_file,
    measure_reads,
    temporary_file,
)
from vllm_ssdkv.cli.doctor.check_drives import drives, drives_of
from vllm_ssdkv.cli.doctor.check_result import Finding, fail, ok, warn
from vllm_ssdkv.config.engine import MIN_CAPACITY

_DEADLINE_S: Final = 30.0
_SLOW_BYTES_PER_S: Final = 200e6
"""Less than a SATA SSD; a spinning disk or a network volume."""

_MEMORY: Final = {"tmpfs", "ramfs", "devtmpfs"}
_NETWORK: Final = {"nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "glusterfs", "beegfs", "9p"}


def mount_of(path: Path) -> Mount | None:
    """The mount that holds the path (which need not exist)."""
    real = existing_parent(path).resolve()
    best: Mount | None = None
    for mount in mounts():
        if real.is_relative_to(mount.point) and (
            best is None or len(mount.point) >= len(best.point)
        ):
            best = mount
    return best


def filesystem(subject: str, mount: Mount | None) -> Finding:
    """Check whether the kind of file system suits a store."""
    if mount is None:
        return warn(subject, "unknown file system", "name a directory on a mounted SSD")
    text = f"{mount.kind} on {mount.source}"
    if mount.kind in _MEMORY:
        return warn(subject, f"{text}: memory, lost at reboot", "name a directory on an SSD")
    if mount.kind in _NETWORK or mount.kind.startswith("fuse"):
        return warn(subject, f"{text}: over a network", "name a directory on a local SSD")
    if mount.kind == "overlay":
        return warn(
            subject,
            f"{text}: the container's own layer, slow and lost with it",
            "mount a volume of an SSD into the container and name that",
        )
    return ok(subject, text)


def with_deadline(
    work: Callable[[], list[Finding]], subject: str, seconds: float = _DEADLINE_S
) -> list[Finding]:
    """Run ``work``: its findings, or a failure when it does not end in time.

    A request that never returns cannot be cancelled: its thread is left behind, as a daemon.
    """
    found: list[Finding] = []

    def run() -> None:
        try:
            found.extend(work())
        except OSError as error:
            cure = "check the cable, the kernel log and the file system"
            found.append(fail(subject, f"{error.strerror or error}", cure))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        return [fail(subject, f"no answer in {seconds:.0f} s", "check the kernel log")]
    return found


def space(subject: str, directory: Path) -> Finding:
    """Check whether a store would fit, and how large it would be when no capacity is given."""
    free = free_bytes(directory)
    text = f"{approximate_size(free)} free"
    if free < MIN_CAPACITY:
        return fail(subject, text, f"free at least {approximate_size(MIN_CAPACITY)}")
    capacity = default_capacity(directory)
    text = f"{text}; a store would take {approximate_size(capacity)} by default"
    if capacity < MIN_CAPACITY:
        return warn(subject, text, "free some space, or give the device's capacity")
    return ok(subject, text)


def locking(subject: str, fd: int) -> Finding:
    """Check whether a second open file description is refused a lock that the first one holds."""
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    other = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return ok(subject, "exclusive locks hold")
    finally:
        os.close(other)
    return fail(
        subject,
        "two holders of one exclusive lock: nothing keeps a second engine out",
        "name a directory on a local file system",
    )


def speed(subject: str, rates: Rates) -> list[Finding]:
    """O_DIRECT and the measured rates, as findings."""
    findings: list[Finding] = []
    if rates.direct:
        findings.append(ok(f"{subject}: O_DIRECT", "works"))
    else:
        findings.append(
            warn(
                f"{subject}: O_DIRECT",
                "refused by the file system; every byte goes through the page cache",
                'works with io.direct "auto" or "off"; ext4 and xfs on an SSD are faster',
            )
        )
    parts = [
        f"{what} {rate / 1e6:,.0f} MB/s"
        for what, rate in (("write", rates.write), ("read", rates.read))
        if rate is not None
    ]
    text = f"{', '.join(parts)} ({approximate_size(rates.nbytes)}, 8 requests of 512 KiB at a time)"
    slowest = min(rate for rate in (rates.write, rates.read) if rate is not None)
    if slowest < _SLOW_BYTES_PER_S:
        findings.append(
            warn(f"{subject}: speed", text, "name an SSD; a store slower than the GPU helps little")
        )
    else:
        findings.append(ok(f"{subject}: speed", text))
    return findings


def directory(path: Path) -> list[Finding]:
    """Check a directory. What it does not have yet is created by the engine, not here."""
    name = str(path)
    place = existing_parent(path)
    if not place.is_dir():
        return [fail(name, f"{place} is not a directory", "name a directory or a block device")]
    if place not in {path, path.parent} and not path.is_relative_to(default_root()):
        # An engine makes the directory, but not its parents: a drive may be missing there.
        cure = f"mount the file system there, or create the directory with mkdir -p {path}"
        return [fail(name, f"does not exist, nor does {path.parent}", cure)]
    if not os.access(place, os.W_OK | os.X_OK):
        cure = f"give this user (uid {os.geteuid()}) write permission"
        return [fail(name, f"{place} is not writable", cure)]
    mount = mount_of(path)
    findings = [
        ok(name, "writable directory" if place == path else f"will be created in {place}"),
        filesystem(f"{name}: file system", mount),
        *drives(f"{name}: drive", drives_of(path, mount.source if mount else "")),
        space(f"{name}: space", path),
    ]
    nbytes = min(MAX_BYTES, free_bytes(path) // 8) // REQUEST_BYTES * REQUEST_BYTES
    if nbytes == 0:
        return findings
    with temporary_file(place) as fd:
        findings.append(locking(f"{name}: flock", fd))
        findings.extend(speed(name, measure_file(fd, nbytes)))
    return findings


def raw_device(path: Path) -> list[Finding]:
    """Check a raw block device by reading only: it may hold a store."""
    name = str(path)
    if any(mount.source in {name, str(path.resolve())} for mount in mounts()):
        return [fail(name, "mounted as a file system", "unmount it, or name a directory on it")]
    if not os.access(path, os.R_OK | os.W_OK):
        cure = f"give this user (uid {os.geteuid()}) read and write permission"
        return [fail(name, "raw block device without permission", cure)]
    size = default_capacity(path)
    findings = [
        ok(name, f"raw block device of {approximate_size(size)}"),
        *drives(f"{name}: drive", drives_of(path)),
    ]
    if size < MIN_CAPACITY:
        cure = f"a device needs at least {approximate_size(MIN_CAPACITY)}"
        return [fail(name, f"raw block device of {approximate_size(size)}", cure)]
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        findings.extend(
            speed(name, measure_reads(fd, min(MAX_BYTES, size // REQUEST_BYTES * REQUEST_BYTES)))
        )
    finally:
        os.close(fd)
    return findings


def device(path: Path) -> list[Finding]:
    """Check one device; always returns, also when the device does not answer."""
    check = raw_device if is_block_device(str(path)) else directory
    return with_deadline(lambda: check(path), str(path))
