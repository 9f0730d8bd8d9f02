"""Location of a store's state, and of the manifest that counts among all on its devices.

``store.json`` in the state directory is the first choice. When it is damaged, lost with its drive,
or older than a copy on a device, which is true of a backup, the newest copy takes its place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_ssdkv.base.errors import DamagedError, FormatError, StoreError
from vllm_ssdkv.store.devices.manifest_copies import (
    FoundCopy,
    copies_on,
    holds_data,
    newest,
    read_copy,
)
from vllm_ssdkv.store.format.journal_record import JOURNAL
from vllm_ssdkv.store.format.manifest import COPY, NAME, Manifest, way_out

COPIES_SINCE = 5
"""Version of the manifest from which on devices have copies."""


@dataclass(frozen=True, slots=True)
class Location:
    """The manifest that counts.

    Attributes:
        manifest: None: there is none, the store is new.
        problem: Why it is not the ``store.json`` of the state directory; empty when it is.
        source: Where it lies then.
        damage: The same as an error, where it is no mere loss of a drive.
        journal_void: Whether a journal in the state directory is older than the manifest.
        without_copy: State directory and devices that should have a copy of it, and have none that
            is whole.
    """

    manifest: Manifest | None
    problem: str = ""
    source: Path | None = None
    damage: FormatError | None = None
    journal_void: bool = False
    without_copy: tuple[Path, ...] = ()


def choose_state(paths: Sequence[Path], default: Path | None = None) -> Path | None:
    """The state directory, where nobody names it. Blocks on I/O.

    The order of devices may change, and with it the default; so where ``store.json`` lies decides.
    Several of one store are left where a drive was away: the newest counts. Without any, the copies
    on the devices say which of these places it is; else it is where the newest copy is. A place
    that nobody named is never taken: it may be that of another copy of the store.

    Args:
        paths: The devices.
        default: Where the state of a new store would be.

    Returns:
        None: without a default there is nothing of a store.
    """
    whole: list[tuple[Path, Manifest]] = []
    damaged: list[Path] = []
    for path in paths:
        try:
            manifest = Manifest.read(path / NAME)
        except FormatError:
            damaged.append(path)
        except StoreError:
            continue  # a drive that is dead, or no directory
        else:
            if manifest is not None:
                whole.append((path, manifest))
    if whole:
        store = whole[0][1].store
        mine = [(path, manifest) for path, manifest in whole if manifest.store == store]
        return max(mine, key=lambda found: found[1].revision)[0]
    if damaged:
        return damaged[0]
    copy = newest(copies_on(paths)[0])
    if copy is None:
        return default
    places = [path for path in paths if _is_directory(path)]
    before = [path for path in places if str(path.resolve()) == copy.manifest.state]
    if before:
        return before[0]
    if default is not None and _is_directory(default):
        return default
    return next((p for p in (copy.place, *places) if _is_directory(p)), default)


def no_store(looked: Sequence[Path]) -> StoreError:
    """The error where no store is found in these places. Blocks on I/O."""
    if not looked:
        return StoreError("name the devices of a store; ssdkv ls lists those that need no name")
    for path in looked:
        try:
            if not path.exists():
                return StoreError(f"{path} does not exist: is it mounted?")
            Manifest.read(path / NAME)
        except OSError as error:
            return StoreError(f"{path}: {error.strerror}")
        except StoreError as error:
            if not path.is_block_device():
                return error  # it is there, and cannot be read
    return StoreError(
        f"no {NAME} in {', '.join(map(str, looked))}: name the devices of a store, or its state "
        "directory with --state-dir"
    )


def is_state_directory(path: Path) -> bool:
    """Check whether a store's manifest is here, or was; a device's copy is none. Blocks."""
    if (path / NAME).exists():
        return True
    try:
        copy = Manifest.load_copy(path)
    except StoreError:
        return False
    # Before version 5 copies lay beside the manifest only.
    return copy is not None and copy.state in ("", str(path.resolve()))


def holds_manifest(state: Path, store: str) -> bool:
    """Check whether the manifest of a store, or the copy beside it, is in this directory."""
    with contextlib.suppress(StoreError, OSError):
        found = any_manifest(state)
        return found is not None and found.store == store
    return False


def state_elsewhere(device: Path) -> Path | None:
    """Directory of the state of the store that a device is of, if it is there, and elsewhere.

    Blocks on I/O.
    """
    if is_state_directory(device):
        return None
    try:
        copy = read_copy(device)
    except StoreError:
        return None
    if copy is None or not copy.state or not holds_manifest(Path(copy.state), copy.store):
        return None
    return Path(copy.state)


def any_manifest(state: Path) -> Manifest | None:
    """``store.json`` of a state directory, or the copy beside it, whichever is whole; None: neither
    is. Blocks on I/O.

    Raises:
        StoreError: they cannot be read, or are of another version.
    """
    for path in (state / NAME, state / COPY):
        found, _ = _read(path)
        if found is not None:
            return found
    return None


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False


def locate(state: Path, paths: Sequence[str | Path]) -> Location:
    """The manifest that counts, given the state directory. Blocks on I/O; changes nothing.

    Args:
        state: The state directory; it may be empty.
        paths: The devices.

    Raises:
        FormatError: ``store.json`` is of another version; or it is damaged, and there is no copy.
        StoreError: it cannot be read.
    """
    here = str(state.resolve())
    damage: FormatError | None
    own, damage = _read(state / NAME)
    beside, _ = _read(state / COPY)
    others = [Path(path) for path in paths if str(Path(path).resolve()) != here]
    copies, _ = copies_on(others)
    store = next((manifest.store for manifest in (own, beside) if manifest is not None), None)
    best = newest(copies, store)
    if own is not None and (best is None or best.manifest.revision <= own.revision):
        return Location(own, without_copy=_without_copy(state, own, beside, others, copies))
    if beside is not None and (best is None or best.manifest.revision <= beside.revision):
        best = FoundCopy(state, beside)
    if best is None:
        if damage is not None:
            raise damage
        return Location(None)
    manifest = best.manifest
    # Before version 5 copies lay beside the manifest only; a store that was moved has its journal.
    journal = (state / JOURNAL).exists()
    moved = best.place == state and (not manifest.state or journal)
    at_home = moved or damage is not None or manifest.state == here
    if own is not None:
        damage = FormatError(
            f"{state / NAME} is older than its copy on {best.place} (revision {own.revision}, "
            f"there {manifest.revision}), like one from a backup: {way_out(state)}"
        )
    elif damage is None and at_home and (beside is not None or journal):
        damage = DamagedError(f"{state / NAME} is missing, but its copy is there: {way_out(state)}")
    problem = str(damage or f"{state / NAME} is not there")
    void = own is not None or not at_home
    lacking = _without_copy(state, manifest, beside, others, copies)
    return Location(manifest, problem, best.place, damage, void, lacking)


def _read(path: Path) -> tuple[Manifest | None, DamagedError | None]:
    try:
        return Manifest.read(path), None
    except DamagedError as error:
        return None, error


def _without_copy(
    state: Path,
    manifest: Manifest,
    beside: Manifest | None,
    devices: Sequence[Path],
    copies: Sequence[FoundCopy],
) -> tuple[Path, ...]:
    """Places that are to have a copy of the manifest, old or new, and have none."""
    lacking = [state] if beside is None or beside.store != manifest.store else []
    if manifest.version >= COPIES_SINCE:
        there = {copy.place for copy in copies if copy.manifest.store == manifest.store}
        lacking += [p for p in devices if p not in there and holds_data(p, manifest)]
    return tuple(lacking)


def belongs(device: Path, state: Path, manifest: Manifest) -> bool:
    """Check whether a device belongs to the store of this state directory, and to no copy of it.

    The device's own copy of the manifest says so. Blocks on I/O.

    Args:
        device: Directory or block device.
        state: The state directory.
        manifest: The one that counts there.
    """
    try:
        copy = read_copy(device)
    except StoreError:
        return False
    if copy is None or copy.store != manifest.store or copy.revision > manifest.revision:
        return False
    here = str(state.resolve()), state.stat().st_ino
    return (copy.state, copy.inode) == (manifest.state, manifest.inode) == here
