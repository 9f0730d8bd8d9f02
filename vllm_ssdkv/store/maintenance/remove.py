"""Removing a store: the files that carry its name, when nobody uses it, and nothing else.

A store is removed from the directories that somebody named. Where only the state directory is
named, the devices must say that it is theirs: a copy or a backup of it names the same devices, and
a device may hold another store by now. Every file is asked whose it is when the removal is planned,
and again, locked, before it goes.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from vllm_ssdkv.base.durable_file import sync_directory
from vllm_ssdkv.base.errors import DeviceError, FormatError, StoreError
from vllm_ssdkv.base.file_lock import lock_file
from vllm_ssdkv.store.devices.discovery import look
from vllm_ssdkv.store.devices.manifest_copies import copies_on, wipe_copies
from vllm_ssdkv.store.devices.owner import (
    DATA_NAME,
    MANIFESTS,
    NAMELESS,
    files_named_alike,
    owner,
    owner_of,
    owners_of_data,
)
from vllm_ssdkv.store.format.journal_record import JOURNAL
from vllm_ssdkv.store.format.manifest import COPY, NAME, Manifest, has_manifest, locked
from vllm_ssdkv.store.format.superblock import BLOCK_BYTES, COPY_OFFSETS
from vllm_ssdkv.store.location import (
    any_manifest,
    belongs,
    choose_state,
    is_state_directory,
    no_store,
    state_elsewhere,
)
from vllm_ssdkv.store.maintenance.offline_store import is_raw

_OF_DEVICES = (f"{COPY}.tmp", COPY)


@dataclass(frozen=True, slots=True)
class Kept:
    """A file, or what is at the path of a device, that stays, and why."""

    path: Path
    why: str


@dataclass(frozen=True, slots=True)
class Removal:
    """Files and devices to be removed, and their store.

    Attributes:
        store: UUID of the store.
        model: Its model's name; empty when nobody knows.
        last_opened: Seconds since 1970 (UTC); 0 when nobody knows.
        state: The state directory; None where it is gone.
        files: In the order in which they go. The manifest goes last: a removal that was
            interrupted can be started again.
        raw: Block devices whose superblocks are overwritten with zeros.
        missing: Devices of the store that are not there; nothing can be removed from them.
        kept: What is left alone although it might be taken for a part of the store.
        nbytes: Space that the files occupy.
    """

    store: str
    model: str
    last_opened: int
    state: Path | None
    files: tuple[Path, ...]
    raw: tuple[Path, ...]
    missing: tuple[Path, ...]
    kept: tuple[Kept, ...]
    nbytes: int


def plan_removal(directories: Sequence[Path], state_dir: Path | None = None) -> Removal:
    """Plan the removal of a store. Blocks on I/O; changes nothing.

    Args:
        directories: Its devices and its state directory; or the state directory alone, when
            it and the devices are where they were last.
        state_dir: The state directory, when it is on no device.

    Raises:
        StoreError: there is no store; one of the places holds another one; or it cannot be told
            whether a device that was not named belongs to it. The text says the way out.
    """
    named = _distinct([*directories, *([] if state_dir is None else [state_dir])])
    state = _state_of(named, state_dir)
    known = _whole_manifest(state)
    store = _identity(named, state) if known is None else known.store
    devices = [] if known is None else [Path(device.path) for device in known.devices]
    _refuse_others(named, devices, state, store)
    places = [place for place in named if place.exists()]
    missing, kept = [], []
    unproven: list[Path] = []
    for device in _distinct([] if known is None else _not_named(known, places)):
        if not device.exists():
            missing.append(device)
        elif not _owns(device, store):
            kept.append(Kept(device, _of_another(owners_of_data(device))))
        elif known is not None and belongs(device, state, known):
            places.append(device)
        else:
            unproven.append(device)
    if unproven:
        paths = " ".join(map(str, unproven))
        was = known.state if known is not None and known.state else "nobody knows where"
        raise StoreError(
            f"{state} is not known to be the state directory of the store {store} on {paths}: that "
            f"was {was}. It may be a copy or a backup, and nothing was removed. If these are to "
            f"go, too, name them: {paths}. A copy of a state directory goes like any folder"
        )
    found: list[Path] = []
    for place in places:
        is_state = _same(place, state) or _names(place / NAME, store)
        of_store, left = _sort_out(place, store, is_state=is_state)
        found += of_store
        kept += left
    raw = tuple(place for place in places if is_raw(place) and store in owners_of_data(place))
    found.sort(key=_turn)
    return Removal(
        store,
        "" if known is None else known.model,
        0 if known is None else known.last_opened,
        state,
        tuple(found),
        raw,
        tuple(missing),
        tuple(kept),
        _stored_bytes(found),
    )


def plan_left_over(places: Sequence[Path], store: str) -> Removal:
    """Plan the removal of what a store has left on devices that were away when it was removed.

    Blocks on I/O; changes nothing.

    Args:
        places: Directories and block devices.
        store: UUID of the store.

    Raises:
        StoreError: there is nothing of it; or the store is still to be found elsewhere.
    """
    try:
        store = str(UUID(store))
    except ValueError:
        raise StoreError(f"{store} is no UUID of a store: {_stores_there(places)}") from None
    named = _distinct(places)
    for place in named:
        if not place.exists():
            raise StoreError(f"{place} does not exist: is it mounted?")
        if _names(place / NAME, store):
            raise StoreError(f"{place} is the state directory of the store {store}: {_rm(place)}")
    copies = [c.manifest for c in copies_on(named)[0] if c.manifest.store == store]
    for elsewhere in _known_places(copies):
        if any(_same(elsewhere, place) for place in named):
            continue
        at_home = any(_same(elsewhere, Path(copy.state)) for copy in copies if copy.state)
        if _names(elsewhere / NAME, store) or (at_home and _names(elsewhere / COPY, store)):
            raise StoreError(f"the store {store} is in {elsewhere} still: {_rm(elsewhere)}")
        if store in owners_of_data(elsewhere):
            raise StoreError(
                f"the store {store} has data on {elsewhere}, too, which a start of the engine "
                "could use: name all of its devices"
            )
    found: list[Path] = []
    kept: list[Kept] = []
    for place in named:
        of_store, left = _sort_out(place, store, is_state=False)
        found += of_store
        kept += left
    raw = tuple(place for place in named if is_raw(place) and store in owners_of_data(place))
    if not (found or raw):
        raise StoreError(f"nothing of the store {store} is there: {_stores_there(named)}")
    newest = max(copies, key=lambda manifest: manifest.revision, default=None)
    return Removal(
        store,
        "" if newest is None else newest.model,
        0 if newest is None else newest.last_opened,
        None,
        tuple(found),
        raw,
        (),
        tuple(kept),
        _stored_bytes(found),
    )


# ---- which store ----


def _distinct(paths: Sequence[Path]) -> list[Path]:
    """Each place once, by whatever name."""
    return list({path.resolve(): path for path in reversed(paths)}.values())[::-1]


def _same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


def _state_of(named: Sequence[Path], state_dir: Path | None) -> Path:
    """The state directory among the places that were named."""
    if not named:
        raise no_store(named)
    for path in named if state_dir is None else [state_dir]:
        if not path.exists() and choose_state(named) is None:
            raise StoreError(f"{path} does not exist: is it mounted?")
    state = state_dir or choose_state(named)
    if state is None or not has_manifest(state):
        raise no_store(named)
    elsewhere = state_elsewhere(state)
    if elsewhere is not None:
        raise StoreError(
            f"{state}: the state directory of this store is {elsewhere}, and {_rm(elsewhere)}; to "
            "take a drive out of a store, take it out of the option devices"
        )
    copy = _whole_manifest(state)
    if copy is not None and not is_state_directory(state):
        raise StoreError(
            f"{state} is a device of the store {copy.store}, whose state directory was "
            f"{copy.state}. If that is gone for good: ssdkv rm --left-over {copy.store} {state}"
        )
    return state


def _whole_manifest(state: Path) -> Manifest | None:
    try:
        return any_manifest(state)
    except FormatError:
        return None  # of another version: only its name counts


def _identity(named: Sequence[Path], state: Path) -> str:
    """UUID of the store whose manifest cannot be read: by what is there with a name."""
    found: set[str] = set()
    for name in (NAME, COPY, JOURNAL):
        with contextlib.suppress(OSError):
            named_here = owner_of(state / name)
            found |= set() if named_here is None else {named_here}
    for place in named:
        found |= owners_of_data(place)
    if len(found) != 1:
        which = "none" if not found else " and ".join(sorted(found))
        raise StoreError(
            f"the manifest in {state} cannot be read, and the other files name {which}: it cannot "
            "be told which store is to be removed. Name directories of one store only, or delete "
            "the files yourself"
        )
    return found.pop()


def _refuse_others(named: Sequence[Path], devices: Sequence[Path], state: Path, store: str) -> None:
    """Raise StoreError for a place that is not there, or that holds another store only."""
    for place in named:
        if not place.exists():
            if any(_same(place, device) for device in devices):
                continue
            raise StoreError(f"{place} does not exist: is it mounted?")
        owners = owners_of_data(place)
        if owners and store not in owners and not _same(place, state):
            raise StoreError(
                f"{place} holds data of the store {', '.join(sorted(owners))}, not of {store} in "
                f"{state}: nothing was removed"
            )


def _not_named(manifest: Manifest, places: Sequence[Path]) -> list[Path]:
    """Places where the manifest saw devices that are none of these: a device is known by its data
    files, wherever it is now."""
    seen = [look(str(place), manifest.tp_size, manifest.store).names for place in places]
    names = frozenset[str]().union(*seen)
    paths = [Path(device.path) for device in manifest.devices if not names & set(device.files)]
    return [path for path in paths if not any(_same(path, place) for place in places)]


def _known_places(manifests: Sequence[Manifest]) -> list[Path]:
    """Places of state and devices that these name."""
    states = [Path(manifest.state) for manifest in manifests if manifest.state]
    devices = [Path(device.path) for m in manifests for device in m.devices]
    return [place for place in _distinct([*states, *devices]) if place.exists()]


def _stores_there(places: Sequence[Path]) -> str:
    """Stores that can be named, for messages."""
    found = sorted({name for place in places if place.exists() for name in owners_of_data(place)})
    return f"there is data of {', '.join(found)}" if found else "there is no data of any store"


def _rm(state: Path) -> str:
    return f"`ssdkv rm {state}` removes it"


# ---- which files ----


def _sort_out(place: Path, store: str, *, is_state: bool) -> tuple[list[Path], list[Kept]]:
    """Files of the store in a directory, and others with such names and why they stay.

    What names no store goes only in the state directory, where nobody else keeps such files; a
    data file never does.
    """
    files: list[Path] = []
    kept: list[Kept] = []
    if is_raw(place):
        owners = owners_of_data(place)
        if store not in owners:
            kept.append(Kept(place, _of_another(owners)))
        return files, kept
    has_data = False
    for file in files_named_alike(place):
        data = DATA_NAME.fullmatch(file.name) is not None
        if not (data or file.name in _OF_DEVICES or is_state):
            continue
        try:
            named = store if file.name in NAMELESS else owner_of(file)
        except OSError as error:
            kept.append(Kept(file, f"it cannot be read: {error.strerror}"))
            continue
        has_data |= data and named == store
        ours = named == store or (named is None and not data and (is_state or has_data))
        if ours:
            files.append(file)
        elif named is None:
            why = "no whole superblock" if data else "no whole checksum"
            kept.append(Kept(file, f"it has {why}, so nobody knows whose it is"))
        else:
            kept.append(Kept(file, _of_another({named})))
    return files, kept


def _turn(file: Path) -> int:
    """Order of a file's removal: data first, the manifest last."""
    if DATA_NAME.fullmatch(file.name):
        return -2
    return MANIFESTS.index(file.name) if file.name in MANIFESTS else -1


def _owns(place: Path, store: str) -> bool:
    """Check whether anything on a device is the store's."""
    return store in owners_of_data(place) or _names(place / COPY, store)


def _names(file: Path, store: str) -> bool:
    """Check whether a file is there and names the store."""
    with contextlib.suppress(OSError):
        return owner_of(file) == store
    return False


def _of_another(owners: set[str]) -> str:
    if not owners:
        return "nothing of the store is there"
    return f"it is of the store {', '.join(sorted(owners))}"


def _stored_bytes(files: Sequence[Path]) -> int:
    return sum(file.stat().st_blocks * 512 for file in files)


# ---- removing ----


def check_unused(removal: Removal) -> None:
    """Check that nobody uses what is to be removed. Blocks on I/O; changes nothing.

    Raises:
        StoreLockedError: somebody uses it.
        StoreError: a file is another one by now.
    """
    with _all_held(removal):
        pass


def remove(removal: Removal) -> None:
    """Remove it. Directories stay. Blocks on I/O.

    Raises:
        StoreLockedError: somebody uses it; nothing was removed.
        StoreError: a file is another one by now, and nothing was removed; or one cannot be removed.
    """
    with _all_held(removal) as devices:
        for fd, path in zip(devices, removal.raw, strict=True):
            _wipe(fd, path, removal.store)
        for file in removal.files:
            try:
                file.unlink(missing_ok=True)
                sync_directory(file.parent)
            except OSError as error:
                raise StoreError(f"cannot remove {file}: {error.strerror}") from error


@contextlib.contextmanager
def _all_held(removal: Removal) -> Iterator[list[int]]:
    """Lock everything that is to be removed; descriptors of the block devices."""
    with contextlib.ExitStack() as stack:
        if removal.state is not None:
            stack.enter_context(locked(removal.state, None))
        for file in removal.files:
            stack.enter_context(_held(file, removal.store))
        yield [stack.enter_context(_held_device(path, removal.store)) for path in removal.raw]


@contextlib.contextmanager
def _held(path: Path, store: str) -> Iterator[None]:
    """A file of the store, locked if engines lock it, and looked at once more."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise StoreError(f"cannot open {path}: {error.strerror}") from error
    try:
        data = DATA_NAME.fullmatch(path.name) is not None
        if data or path.name == JOURNAL:
            lock_file(fd, path, "store")
        try:
            named = store if path.name in NAMELESS else owner(fd, path.name)
            same = os.path.samestat(os.fstat(fd), path.lstat())
        except OSError as error:
            raise StoreError(f"cannot look at {path}: {error.strerror}") from error
        if not same or named not in ({store} if data else {store, None}):
            raise StoreError(f"{path} has changed meanwhile, nothing was removed: look again")
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def _held_device(path: Path, store: str) -> Iterator[int]:
    try:
        fd = os.open(path, os.O_RDWR | os.O_EXCL | os.O_CLOEXEC)
    except OSError as error:
        raise StoreError(f"cannot open {path}: {error.strerror}") from error
    try:
        lock_file(fd, path, "store")
        try:
            named = owner(fd, "")
        except OSError as error:
            raise StoreError(f"cannot look at {path}: {error.strerror}") from error
        if named != store:
            raise StoreError(f"{path} has changed meanwhile, nothing was removed: look again")
        yield fd
    finally:
        os.close(fd)


def _wipe(fd: int, path: Path, store: str) -> None:
    """Make a block device new: where superblocks and manifests were, there are zeros afterwards."""
    try:
        wipe_copies(fd, store)
        for offset in COPY_OFFSETS:
            with mmap.mmap(-1, BLOCK_BYTES) as zeros:
                os.pwrite(fd, zeros, offset)
        os.fdatasync(fd)
    except OSError as error:
        raise DeviceError(f"cannot wipe {path}: {error.strerror}") from error
