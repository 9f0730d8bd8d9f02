"""Index of the volumes that several engines in mode ``page`` share.

Workers move the bytes themselves. The node says which slot holds which block, who may write a slot,
and who reads it: a slot is granted to one session, which publishes it when all of its ranks have
written it. It never changes from then on until nobody has pinned it and it is granted anew. A slot
that its writer has given up is granted when no write of this engine is under way any more.

The journal lies in the directory of the first volume. Grants and pins are in memory alone: a
restart of the node knows of none.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol
from uuid import UUID

import msgspec
import numpy as np

from vllm_ssdkv.base.errors import ConfigError, FormatError, StoreFullError, StoreLockedError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.node.protocol.messages import StoreSpec
from vllm_ssdkv.node.server.claims import Claim
from vllm_ssdkv.node.server.existence import Existence
from vllm_ssdkv.node.server.leases import Lease, pairs_of
from vllm_ssdkv.node.server.volumes import VolumeShelf, write_small
from vllm_ssdkv.store.format.fingerprint import Fingerprint
from vllm_ssdkv.store.format.journal_record import JOURNAL
from vllm_ssdkv.store.format.slot_geometry import I64, PAGE_ALIGN
from vllm_ssdkv.store.index.journal import Journal
from vllm_ssdkv.store.index.slot_index import SlotIndex

_ABOUT: Final = "shared.json"

_LOCK_S: Final = 10.0
"""Wait for a journal that a killed node has still to let go of, in seconds."""

_NONE: Final = np.zeros(0, dtype=np.int64)


class _About(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of :data:`_ABOUT`.

    Attributes:
        slots: Slots of the volumes.
        layout: How they lie there, as engines say it.
        opened: How often the index was opened: epochs of slots that no journal knows are unique.
    """

    slots: int
    layout: str
    opened: int = 0


class Write(Protocol):
    """One write to a volume."""

    def done(self) -> bool:
        """Check whether it has ended. Never blocks."""


class Writer(Protocol):
    """One connection by which a worker writes to shared volumes."""

    def writes(self) -> Sequence[Write]:
        """Writes that have not ended, also when the connection has. Any thread."""


class Writers:
    """Connections by which the workers of each run write. Any thread may call.

    Example:
        writers = Writers()
        writers.add("a run", link)
        writers.under_way("a run")
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[str, list[Writer]] = {}
        self._left: list[tuple[str, Write]] = []
        """Writes of connections that are over, with their run."""

    def add(self, run: str, writer: Writer) -> None:
        """A worker may write by this connection from now on."""
        with self._lock:
            self._of.setdefault(run, []).append(writer)

    def remove(self, run: str, writer: Writer) -> None:
        """A connection is over; writes may hang."""
        with self._lock:
            self._of[run].remove(writer)
            if not self._of[run]:
                del self._of[run]
            self._left = [(of, write) for of, write in self._left if not write.done()]
            self._left += [(run, write) for write in writer.writes()]

    def under_way(self, run: str) -> list[Write]:
        """Writes of a run that have not ended."""
        with self._lock:
            writes = [write for of, write in self._left if of == run and not write.done()]
            for writer in self._of.get(run, ()):
                writes += writer.writes()
        return writes


class SharedIndex(Existence):
    """Index of shared volumes.

    Attributes:
        volume: The one with the journal.

    Example:
        index = SharedIndex(spec, shelf.shared_directory(fingerprint), Writers())
        slots, epochs = index.grant(lease, 16)
        index.publish(lease, slots, epochs, keys)
    """

    def __init__(self, spec: StoreSpec, directory: Path, writers: Writers):
        """Open the index. Blocks on I/O.

        Raises:
            ConfigError: slots lie otherwise in the volumes.
            StoreError: it cannot be opened.
        """
        super().__init__()
        self.spec, self.path, self.counters = spec, str(directory), Counters()
        self.volume = UUID(directory.name)
        opened = _count_opening(directory / _ABOUT, spec)
        journal = Journal(
            directory / JOURNAL,
            store=self.volume,
            fingerprint=Fingerprint(spec.fingerprint).digest,
            num_slots=spec.slots,
            lock_timeout_s=_LOCK_S,
        )
        self._index = SlotIndex(spec.slots, journal, open_number=opened)
        self._writers = writers
        self._late: list[tuple[list[int], list[Write]]] = []
        """Slots that are not to be granted, each pinned once, and writes that may be to them."""

    @property
    def settled(self) -> bool:
        """Check whether no write may come to a slot that its writer has done with."""
        with self._lock:
            self._take_back()
            return not self._late

    @property
    def next_epoch(self) -> int:
        """Epochs of slots from now on are not below this."""
        with self._lock:
            return self._index.next_epoch

    def gauges(self) -> tuple[dict[str, int], dict[str, int]]:
        """Gauges and counters of the index."""
        with self._lock:
            self._take_back()
            return self._index.gauges(), dict(self._index.counters)

    def grant(self, lease: Lease, count: int) -> tuple[I64, I64]:
        """Slots for a session to write, [count], or none, and their epochs."""
        with self._lock:
            self._take_back()
            try:
                slots = self._index.allocate(count)
            except StoreFullError:
                return _NONE, _NONE
            epochs = self._index.epochs(slots)
            pairs = pairs_of(slots, epochs)
            for slot, epoch in pairs:
                self._claims.add(Claim(slot, epoch, b"", lease.run))
            lease.add(pairs)
            return slots, epochs

    def publish(self, lease: Lease, slots: I64, epochs: I64, keys: Sequence[bytes]) -> None:
        """Every rank of a session has written these slots: have them found, also after a restart.

        Slots that were not granted to the session so are left out.
        """
        found: list[int] = []
        done: list[int] = []
        with self._lock:
            now = time.monotonic()
            for (slot, epoch), key in zip(pairs_of(slots, epochs), keys, strict=True):
                self._chains.claimed(key, now)
                claim = self._claims.find(slot, epoch)
                if claim is None or not lease.holds(slot, epoch):
                    continue
                older = self._index.find(key)
                if older is not None and not self._is_there(lease, older):
                    # This session has computed it anew: from here on for everybody.
                    self._drop([(older, self._index.epoch(older))], "engine")
                self._claims.remove(claim)
                done.append(slot)
                if self._index.publish(slot, key):
                    found.append(slot)
            self._index.durable(np.array(found, dtype=np.int64))
            self._keep(done, lease.run)  # a first try may hang, on a connection before

    def _dropped(self, claim: Claim) -> None:
        """The slot stays its writer's until this one lets go of it."""

    def _give_up(self, claim: Claim) -> None:
        """The writer lets go of a slot: others get it when nothing can be written there."""
        super()._give_up(claim)
        self._keep([claim.slot], claim.run)

    def _keep(self, slots: list[int], run: str) -> None:
        """Do not grant slots before the writes of a run that are under way end. Lock held."""
        writes = self._writers.under_way(run) if slots else []
        if writes:
            self._index.pin(np.array(slots, dtype=np.int64))
            self._late.append((slots, writes))

    def _take_back(self) -> None:
        """Have slots granted again to which nothing is written any more. Lock held."""
        late, self._late = self._late, []
        for slots, writes in late:
            if all(write.done() for write in writes):
                self._index.unpin(np.array(slots, dtype=np.int64))
            else:
                self._late.append((slots, writes))

    def close(self) -> None:
        """Make the journal durable. Blocks."""
        with self._lock:
            self._index.close(_LOCK_S)


def _count_opening(path: Path, spec: StoreSpec) -> int:
    """Number of this opening.

    Raises:
        ConfigError: the slots lie otherwise.
        StoreError: the file cannot be read or written.
    """
    wanted = _About(spec.slots, spec.layout.hex())
    try:
        known = msgspec.json.decode(path.read_bytes(), type=_About)
    except FileNotFoundError:
        known = wanted
    except (OSError, msgspec.DecodeError) as error:
        raise FormatError(
            f"{path} cannot be read ({error}): remove the volume {path.parent.name} (`ssdkv node "
            "volumes`), and what it holds is computed again"
        ) from error
    if (known.slots, known.layout) != (wanted.slots, wanted.layout):
        raise ConfigError(
            f"share_contexts: {known.slots} slots lie otherwise in the volume {path.parent.name} "
            f"than {wanted.slots} of this engine do: give all engines the same options and the "
            "node's drives the capacity that they had, or remove the volume (`ssdkv node volumes`)"
        )
    known = msgspec.structs.replace(known, opened=known.opened + 1)
    write_small(path, msgspec.json.encode(known))
    return known.opened


class SharedIndexes:
    """Indexes of shared volumes. Any thread may call; methods block on I/O.

    An index stays open without a user, until its volume is removed: who comes back within its
    patience finds it however long it takes to read the journal, and nobody gets slots to which
    writes hang.

    Attributes:
        writers: Connections of the workers.

    Example:
        shared = SharedIndexes(shelf)
        index = shared.take(spec)
        shared.give_back(index)
    """

    def __init__(self, shelf: VolumeShelf):
        self._shelf = shelf
        shelf.before_removal = self._volume_goes
        self.writers = Writers()
        self._opening = threading.Lock()
        """Lock held while an index is opened or closed, which may take a while."""
        self._lock = threading.Lock()
        """Guard of the fields below."""
        self._open: dict[bytes, SharedIndex] = {}
        self._users: Counter[bytes] = Counter()

    def take(self, spec: StoreSpec) -> SharedIndex:
        """The index that an engine asks for, which is opened if need be; :meth:`give_back` it.

        Raises:
            ConfigError: slots lie otherwise in the volumes, or these have no room for so many, or
                there are none.
            StoreError: it cannot be opened.
        """
        name = Fingerprint(spec.fingerprint).digest
        with self._opening:
            index = self._open.get(name)
            if index is not None and not _fits(index, spec):
                self._close_unused(name)
                index = self._open.get(name)
            if index is None:
                self._check_room(spec, name)
                index = SharedIndex(spec, self._shelf.shared_directory(name), self.writers)
                with self._lock:
                    self._open[name] = index
            elif not _fits(index, spec):
                raise ConfigError(
                    "share_contexts: slots of another engine lie otherwise in the volumes: give "
                    "all engines the same options, and the node's drives the capacity that they had"
                )
            with self._lock:
                self._users[name] += 1
            return index

    def _check_room(self, spec: StoreSpec, name: bytes) -> None:
        """Check that slots are not more than volumes can have: each takes memory of the node."""
        nbytes = self._shelf.shared_bytes(name)
        least = max(PAGE_ALIGN, spec.layers * spec.payload_bytes)
        if spec.slots * least > nbytes:
            raise ConfigError(
                f"share_contexts: {spec.slots} slots of at least {least} bytes do not lie in "
                f"volumes of {nbytes} bytes: start the engine again, with an empty state_dir if "
                "that does not help"
            )

    def give_back(self, index: SharedIndex) -> None:
        """A user of an index has gone."""
        with self._lock:
            self._users[Fingerprint(index.spec.fingerprint).digest] -= 1

    def _close_unused(self, name: bytes) -> None:
        with self._lock:
            index = self._open[name]
            if self._users[name] or not index.settled:
                return
            del self._open[name], self._users[name]
        index.close()

    def _volume_goes(self, volume: UUID) -> None:
        """Close the index in a volume that is about to be removed.

        Raises:
            StoreLockedError: an engine uses it, or writes to it hang.
        """
        with self._opening:
            names = [name for name, one in self._open.items() if one.volume == volume]
            for name in names:
                self._close_unused(name)
                if name in self._open:
                    raise StoreLockedError(
                        f"the volume {volume} is in use by an engine, or by writes that hang"
                    )

    def indexes(self) -> list[SharedIndex]:
        """Indexes that engines use now."""
        with self._lock:
            return [index for name, index in self._open.items() if self._users[name]]

    def close(self) -> None:
        """Close all of them."""
        with self._opening:
            for index in self._open.values():
                index.close()


def _fits(index: SharedIndex, spec: StoreSpec) -> bool:
    """Check whether slots of an index lie as an engine says."""
    return (index.spec.slots, index.spec.layout) == (spec.slots, spec.layout)
