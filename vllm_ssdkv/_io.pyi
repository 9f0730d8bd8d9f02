"""Types of the native module ``_io`` (sources in csrc/io, csrc/cache and csrc/metrics).

Every call that waits or moves bytes releases the GIL.
"""

from collections.abc import Iterable
from typing import overload

import numpy as np
from numpy.typing import NDArray

def checksum(addresses: NDArray[np.uint64], nbytes: int, threads: int = 0) -> NDArray[np.uint64]:
    """xxh3-64 (seed 0) of ``nbytes`` at each absolute address; shapes [n] -> [n].

    ``threads`` is an upper limit (0: at most 4); below 4 MiB in total one thread is used. The
    caller guarantees that the memory exists. Raises ValueError for a zero address, TypeError for
    another dtype or a strided array.
    """

def verify(
    addresses: NDArray[np.uint64],
    expected: NDArray[np.uint64],
    nbytes: int,
    threads: int = 0,
) -> NDArray[np.int64]:
    """Ascending positions whose :func:`checksum` is not the expected one; empty if all match."""

def digest(
    addresses: NDArray[np.uint64], nbytes: NDArray[np.uint64], threads: int = 0
) -> NDArray[np.uint64]:
    """Digests for ``nbytes[i]`` bytes at each address, [n]; see ``csrc/io/slot/digest.hpp``.

    ``threads`` and the caller's duties are those of :func:`checksum`.
    """

def read_words(addresses: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The 8 bytes at each absolute address, [n]. The caller guarantees that they exist."""

def populate(address: int, nbytes: int) -> int:
    """Give [address, address + nbytes), multiples of 4096, its memory now; keep its contents.

    Returns 0 or an errno: EINVAL on Linux before 5.14, ENOMEM for a range that is not mapped. Does
    not hold the interpreter. The caller guarantees that the range is its own.
    """

@overload
def copy(
    src: NDArray[np.uint64], dst: NDArray[np.uint64], nbytes: int, threads: int = 0
) -> None: ...
@overload
def copy(
    src: NDArray[np.uint64],
    dst: NDArray[np.uint64],
    nbytes: NDArray[np.uint64],
    threads: int = 0,
) -> None:
    """memcpy from each source to each destination address; shapes [n]; see :func:`checksum`.

    No destination may overlap a source or another destination.
    """

class FrameCache:
    """Native part of ``FrameCache``; states are its ``FrameState``.

    Thread-safe. Raises IndexError for slots and frames that do not exist, TypeError for another
    dtype or a strided array, and changes nothing when it raises.
    """

    def __init__(self, frames: int, slots: int, shut: int) -> None: ...
    def state(self, frame: int) -> int: ...
    def frame_of(self, slot: int) -> int: ...
    def count(self, states: list[int]) -> int: ...
    def frames_of(self, slots: NDArray[np.int64]) -> NDArray[np.int32]: ...
    def slots_of(self, frames: NDArray[np.int32]) -> NDArray[np.int64]: ...
    def spare(self) -> int: ...
    def evictions(self) -> int: ...
    def retain(self, slots: NDArray[np.int64]) -> None: ...
    def release(self, slots: NDArray[np.int64]) -> NDArray[np.int64]: ...
    def referenced(self, slots: NDArray[np.int64]) -> NDArray[np.uint8]: ...
    def borrow(self, slots: NDArray[np.int64]) -> NDArray[np.int32]: ...
    def give_back(self, frames: NDArray[np.int32]) -> None: ...
    def take(
        self, slots: NDArray[np.int64], state: int, spare_contexts: bool
    ) -> NDArray[np.int32]: ...
    def take_within(
        self, slots: NDArray[np.int64], state: int, timeout_s: float
    ) -> NDArray[np.int32]:
        """Releases the GIL while it waits; Ctrl-C ends the wait."""

    def open(self, frames: NDArray[np.int32]) -> None: ...
    def shut(self, frames: NDArray[np.int32]) -> NDArray[np.uint8]: ...
    def start_writing(self, slots: NDArray[np.int64]) -> NDArray[np.int32]: ...
    def settle(self, frames: NDArray[np.int32], state: int) -> None: ...
    def abandon(self, frames: NDArray[np.int32]) -> None: ...
    def forget(self, slots: NDArray[np.int64]) -> None: ...
    def audit(self) -> None:
        """RuntimeError unless all tables agree. For tests: looks at everything."""

class PageCache:
    """Native part of ``SelectedPageCache``, which says what calls do.

    One thread at a time. Raises IndexError for slots, pages and places that do not exist,
    ValueError for arrays that do not belong together or an unknown policy, TypeError for another
    dtype or a strided array.
    """

    def __init__(
        self,
        address: int,
        page_bytes: int,
        header_bytes: int,
        places: int,
        slots: int,
        pages: int,
        policy: str,
    ) -> None: ...
    def acquire(
        self, slots: NDArray[np.int64], pages: NDArray[np.int64], frames: NDArray[np.uint64]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int32], int, int, int, int]:
        """The fields of ``Asked``, in order."""

    def prefetch(
        self,
        slots: NDArray[np.int64],
        pages: NDArray[np.int64],
        frames: NDArray[np.uint64],
        begin: NDArray[np.int32],
        limit: int,
        devices: NDArray[np.uint16],
        quota: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]]: ...
    def complete(
        self,
        keys: NDArray[np.int64],
        places: NDArray[np.int32],
        good: NDArray[np.uint8],
        devices: NDArray[np.uint16],
    ) -> None: ...
    def find(
        self,
        pages: NDArray[np.int64],
        frames: NDArray[np.uint64],
        which: NDArray[np.int32],
        keys: NDArray[np.int64],
        places: NDArray[np.int32],
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]: ...
    def holds(self, slots: NDArray[np.int64], pages: NDArray[np.int64]) -> NDArray[np.uint8]: ...
    def release(self, places: NDArray[np.int32]) -> None: ...
    def forget(self, slots: NDArray[np.int64]) -> None: ...
    def step(self, costs: NDArray[np.float64]) -> None: ...
    def held_in(self, firsts: NDArray[np.int32], length: int) -> NDArray[np.int32]: ...
    def close(self, firsts: NDArray[np.int32], length: int) -> NDArray[np.uint8]: ...
    def open(self, firsts: NDArray[np.int32], length: int) -> None: ...
    def held(self) -> int: ...
    def taken(self) -> int: ...
    def closed(self) -> int: ...
    def evictions(self) -> int: ...
    def asked(self) -> int: ...

def pin_rows(
    slots: NDArray[np.int64],
    row_of: NDArray[np.int32],
    pins: NDArray[np.int32],
    used: NDArray[np.int64],
    now: int,
) -> NDArray[np.int32]:
    """Row of each slot, [n], or -1, which is pinned once more in ``pins`` and used ``now``.

    Raises IndexError, and changes nothing, for slots and rows that do not exist.
    """

def unpin_rows(rows: NDArray[np.int32], pins: NDArray[np.int32]) -> None:
    """End one pin of each of these rows; -1 is skipped."""

def locate(
    first: NDArray[np.int32],
    slots: NDArray[np.int64],
    frames: NDArray[np.uint64],
    pages: NDArray[np.int32],
    begin: NDArray[np.int32],
    heads: int,
    groups: int,
    page_tokens: int,
    first_page: int,
) -> tuple[
    NDArray[np.int64],
    NDArray[np.int64],
    NDArray[np.uint64],
    NDArray[np.int64],
    NDArray[np.int32],
]:
    """Slot, number within it, address of the frame, first token's position and block of each page.

    Row r has the blocks ``first[r]``, ``first[r] + 1``, ... of ``slots`` and ``frames``; head h of
    it the pages ``begin[i] .. begin[i + 1]``, ``i = r * heads + h``.
    """

class Batch:
    """Native :class:`vllm_ssdkv.store.io.engines.protocol.Batch`."""

    def done(self) -> bool: ...
    def wait(self, timeout_s: float) -> bool: ...
    def results(self) -> NDArray[np.int32]: ...
    def notify(self, eventfd: int) -> None:
        """Add 1 to ``eventfd`` when all is done, at once if it is, from the thread that ends it.

        For event loops, which cannot block in ``wait``. The descriptor is duplicated. Raises
        ValueError on a second call, RuntimeError if the descriptor is not open.
        """

class ThreadsEngine:
    """Native part of :class:`vllm_ssdkv.store.io.engines.threads.ThreadsEngine`.

    Duplicates the descriptors, so a hung call keeps the file and its lock, never a reused number.
    The arena must stay mapped until ``close`` returned True.
    """

    def __init__(
        self, fds: list[int], arena_address: int, arena_bytes: int, queue_depth: int
    ) -> None: ...
    def submit(
        self,
        op: int,
        device: NDArray[np.uint16],
        offset: NDArray[np.uint64],
        length: NDArray[np.uint32],
        buffer: NDArray[np.uint64],
        joined: bool = False,
    ) -> Batch: ...
    def statistics(self) -> dict[str, int]: ...
    def close(self, timeout_s: float) -> bool: ...

has_uring: bool
"""True if the build had liburing; else ``UringEngine`` and ``UringSetup`` do not exist."""

class UringSetup:
    """Features that the kernel gave one ring; ``errno`` 0 is success."""

    @property
    def task_run(self) -> str: ...
    @property
    def register_files_errno(self) -> int: ...
    @property
    def register_buffers_errno(self) -> int: ...

class UringEngine:
    """Native part of :class:`vllm_ssdkv.store.io.engines.uring.UringEngine`.

    As :class:`ThreadsEngine`, but raises OSError where there is no io_uring. Its statistics have
    also ``in_flight_max.<device>``, ``ring_<enters|wakes|retries|errors>.<ring>``, and
    ``ring_<registered|refused>.<ring>``: parts of the arena that the kernel registered or not.
    """

    def __init__(
        self, fds: list[int], arena_address: int, arena_bytes: int, queue_depth: int
    ) -> None: ...
    def submit(
        self,
        op: int,
        device: NDArray[np.uint16],
        offset: NDArray[np.uint64],
        length: NDArray[np.uint32],
        buffer: NDArray[np.uint64],
        joined: bool = False,
    ) -> Batch: ...
    def setups(self) -> list[UringSetup]: ...
    def statistics(self) -> dict[str, int]: ...
    def close(self, timeout_s: float) -> bool: ...

def check_requests(
    device: NDArray[np.uint16],
    offset: NDArray[np.uint64],
    length: NDArray[np.uint32],
    buffer: NDArray[np.uint64],
    devices: int,
    arena_bytes: int,
) -> None:
    """Raise the ValueError with which every engine refuses these requests, or return."""

class StripeTable:
    """Native tables of one ``StripeMap``, [lanes * copies * units].

    Raises ValueError when the arrays do not fit, TypeError for another dtype or a strided one.
    """

    def __init__(
        self,
        device: NDArray[np.int64],
        place: NDArray[np.int64],
        row_units: NDArray[np.int64],
        lanes: int,
        copies: int,
        unit_bytes: int,
        slot_bytes: int,
        first_byte: int,
        merge_units: int,
    ) -> None: ...

class Stripes:
    """Ranges of slots, ``first .. first + slots``, each striped by one of the tables. Immutable.

    ``begin`` are the bytes before a range's first unit on each device, [ranges * devices]. The
    errors are those of :class:`StripeTable`.
    """

    def __init__(
        self,
        tables: list[StripeTable],
        first: NDArray[np.int64],
        slots: NDArray[np.int64],
        table_of: NDArray[np.int64],
        begin: NDArray[np.int64],
        devices: int,
    ) -> None: ...
    def extents(
        self,
        slots: NDArray[np.int64],
        offsets: NDArray[np.int64],
        length: int,
        copy: int,
        merged: bool,
        cut: int = 0,
    ) -> tuple[
        NDArray[np.uint16],
        NDArray[np.uint64],
        NDArray[np.uint32],
        NDArray[np.int64],
        NDArray[np.uint64],
    ]:
        """The fields of ``Extents``; ``offsets`` are one or [n]. No
        request has byte ``cut`` of a slot but as its first.

        Raises ValueError for slots in no range and bytes that leave the slot.
        """

class StripedExtents:
    """Requests for bytes of slots, found by :class:`Stripes` in one step, with where they go.

    Args:
        stripes: Where slots lie; the first copies are meant.
        slots: Their numbers, [n].
        offsets: Bytes within each slot, [n], or [1] for all.
        length: Bytes of each.
        places: Arena offset at which those of each slot begin, [n].
        merged: As in :meth:`Stripes.extents`.
        most: Pieces that are neighbours, on the device and in the arena, in one request.
        tails: Arena offset at which what is from byte ``cut`` of each slot on begins, [n]; empty
            where it follows the rest.
        cut: As in :meth:`Stripes.extents`.

    Raises ValueError as :meth:`Stripes.extents`, and for another number of places or tails.
    """

    def __init__(
        self,
        stripes: Stripes,
        slots: NDArray[np.int64],
        offsets: NDArray[np.int64],
        length: int,
        places: NDArray[np.uint64],
        merged: bool,
        most: int,
        tails: NDArray[np.uint64],
        cut: int,
    ) -> None: ...
    def requests(
        self,
    ) -> tuple[NDArray[np.uint16], NDArray[np.uint64], NDArray[np.uint32], NDArray[np.uint64]]:
        """Requests for an engine: device, offset, length, buffer."""

    def parts(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint32]]:
        """Request of each piece, the bytes before it in there, and its own."""

    def extents(
        self,
    ) -> tuple[
        NDArray[np.uint16],
        NDArray[np.uint64],
        NDArray[np.uint32],
        NDArray[np.int64],
        NDArray[np.uint64],
    ]:
        """The pieces, as :meth:`Stripes.extents`."""

    def nbytes(self) -> NDArray[np.float64]:
        """Bytes asked of each device of the stripes."""

    def whole(self, results: NDArray[np.int32]) -> bool:
        """True if requests with these results have moved all of their bytes."""

class SlotShape:
    """Sizes of a slot in bytes; ValueError when the parts of a header do not fit into it."""

    def __init__(
        self,
        header_bytes: int,
        fixed_bytes: int,
        used_bytes: int,
        pages: int,
        page_bytes: int,
        payload_bytes: int,
    ) -> None: ...

def right_headers(
    addresses: NDArray[np.uint64], fixed: NDArray[np.uint8], shape: SlotShape
) -> NDArray[np.uint8]:
    """1 for each header, at absolute addresses [n], that begins with its row of ``fixed``,
    [n * fixed_bytes], and is whole.

    Raises ValueError for a zero address or arrays that do not belong together.
    """

class Stretches:
    """Parts of every slot that go to a block of vLLM's cache in memory; arrays [k], ascending.

    Each is in one page. Part i of block b lies at ``bases[i] + b * steps[i]``; addresses are
    absolute. Raises ValueError for a zero address or arrays that differ in length.
    """

    def __init__(
        self,
        offsets: NDArray[np.uint64],
        sizes: NDArray[np.uint64],
        bases: NDArray[np.uint64],
        steps: NDArray[np.uint64],
    ) -> None: ...

class ArrivalVerifier:
    """Checks slots of a read as they arrive, against headers and xxh3-64, and copies them.

    Args:
        shape: Of the slots.
        addresses: Where each of n slots is read to; absolute.
        fixed: The bytes with which each one's header begins, [n * fixed_bytes].
        blocks: Where they go, [n]; 0 is nowhere.
        slot_of: Which of the slots each of m requests is a part of, [m], ascending.
        begins: Where in the slot each one begins, in bytes, [m]; ascending within a slot.
        lengths: Bytes of each request, [m]. A slot that they do not cover never arrives.
        stretches: What is copied.
        first, step: Of the pages of all slots, one after the other, the first one that is looked
            at, and how far it is to the next.

    One thread at a time. The memory must stay until the last call has returned. Raises ValueError
    for arrays that do not belong together, TypeError for another dtype or a strided one.
    """

    def __init__(
        self,
        shape: SlotShape,
        addresses: NDArray[np.uint64],
        fixed: NDArray[np.uint8],
        blocks: NDArray[np.uint64],
        slot_of: NDArray[np.int64],
        begins: NDArray[np.uint64],
        lengths: NDArray[np.uint32],
        stretches: Stretches,
        first: int,
        step: int,
    ) -> None: ...
    def follow(self, batch: Batch, timeout_s: float) -> bool:
        """Look at all that arrives until the batch has ended, which is True, or time is up."""

    def take(self, results: NDArray[np.int32]) -> None:
        """Look at what has arrived by now, given the results of another engine's batch."""

    def states(self) -> NDArray[np.uint8]:
        """State of each slot: 0 not there, 1 right, 2 another header, 3 a wrong page."""

    def wrong_pages(self) -> NDArray[np.int64]:
        """Slot, as an index, and page of each wrong one, [2 * k], ascending."""

def coalesce_requests(
    device: NDArray[np.uint16],
    offset: NDArray[np.uint64],
    length: NDArray[np.uint32],
    buffer: NDArray[np.uint64],
    most: int,
) -> tuple[
    NDArray[np.uint16],
    NDArray[np.uint64],
    NDArray[np.uint32],
    NDArray[np.uint64],
    NDArray[np.int64],
    NDArray[np.int64],
]:
    """Join requests, [n], with those that go on where they end, ``most`` at most, to [m].

    Returns their device, offset, length and buffer, [m]; and of each part, [n], its request and the
    bytes of that before it.
    """

def part_results(
    results: NDArray[np.int32],
    request: NDArray[np.int64],
    begin: NDArray[np.int64],
    length: NDArray[np.uint32],
) -> NDArray[np.int32]:
    """Results of the parts, [n], from those of their requests, [m]: a failure is everybody's."""

def preallocate(fd: int, nbytes: int) -> int:
    """fallocate(2) of the first ``nbytes``, without glibc's emulation; 0 or an errno."""

def libcrypto() -> tuple[str, str]:
    """Version of the OpenSSL library that was found, and why it cannot be used, empty if it can.

    Loaded at the first call of this or of a ``gcm`` function.
    """

def gcm_seal(
    keys: NDArray[np.uint8],
    identities: NDArray[np.uint8],
    first_page: int,
    source: NDArray[np.uint64],
    target: NDArray[np.uint64],
    nbytes: int,
    threads: int = 0,
) -> NDArray[np.uint8]:
    """Encrypt ``nbytes`` from each source address to its target with AES-256-GCM; may be the same.

    Shapes: keys [n, 32], identities [n, 72], addresses [n, pages]; the tags come as
    [n * pages * 16]. The nonce of page p is p as a little-endian ``uint32``, then eight zero bytes:
    a key must never be used for other pages again. Associated data are the slot's identity with
    bytes 20 to 23 set to p. ``threads`` as in :func:`checksum`, one below 1 MiB in total.

    Raises ValueError for shapes that do not fit, RuntimeError when libcrypto cannot be used.
    """

def gcm_open(
    keys: NDArray[np.uint8],
    identities: NDArray[np.uint8],
    first_page: int,
    addresses: NDArray[np.uint64],
    nbytes: int,
    tags: NDArray[np.uint8],
    threads: int = 0,
) -> NDArray[np.uint8]:
    """Check pages against their tags [n, pages, 16] and decrypt them in place.

    The reverse of :func:`gcm_seal`, with the same errors. Returns 1 for each page that is right,
    [n * pages]; one that is not is zeroed and has a 0.
    """

def gcm_authenticate(
    keys: NDArray[np.uint8], page: int, data: NDArray[np.uint8]
) -> NDArray[np.uint8]:
    """Tags [n * 16] of empty texts with each row of ``data`` [n, m] as associated data.

    Keys are [n, 32]; the nonce as above. The errors are those of :func:`gcm_seal`.
    """

def hmac_sha256(key: NDArray[np.uint8], data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """HMAC-SHA256 under one key [k] of each row of ``data`` [n, m]; [n * 32].

    The errors are those of :func:`gcm_seal`.
    """

class Counters:
    """Native part of :class:`vllm_ssdkv.base.metrics.Counters`, without knowing what is declared.

    Any thread may call: every call holds the GIL.
    """

    def __init__(self) -> None: ...
    def add(self, keys: Iterable[str], values: Iterable[float]) -> None:
        """Raises ValueError: they differ in length, or a value is negative or not a number."""

    def take(self) -> dict[str, float]:
        """Gains since the last call; of new keys also those that are zero."""

    def total(self, key: str) -> float: ...
    def totals(self) -> dict[str, float]: ...

class Mailbox:
    """Memory by which a device asks for pages, and is answered.

    ``requests`` and ``replies`` are addresses of int64 ``[2, 2 + most]``, for steps in turn: of a
    ticket, a count, and a key for each page; and of a ticket, the pages that are lost, and the
    address of each page or 0. A key is the row times ``blocks``, plus the block, times
    ``layer_pages``, plus the page's number in the layer; a negative one asks for nothing. Raises
    ValueError for sizes below 1.
    """

    def __init__(
        self,
        requests: int,
        replies: int,
        most: int,
        layers: int,
        blocks: int,
        layer_pages: int,
    ) -> None: ...
    @property
    def most(self) -> int:
        """Pages of a request, at most."""

class StoredPages:
    """Places of pages, and digests that these are right by.

    Args:
        address: Of the first place.
        page_bytes: From a place to the next, and from a page of a slot to the next.
        header_bytes: Of a slot, before its first page.
        arena: Address of what the engine reads into.
        payload_bytes: Used in a page.
        row_of: Row of each slot's digests, -1 for none, [slots].
        opening: Keys and identities, [rows, words]; of no words where nothing is encrypted.
        marks: Checksums or tags, [rows, pages, words].
    """

    def __init__(
        self,
        address: int,
        page_bytes: int,
        header_bytes: int,
        arena: int,
        payload_bytes: int,
        row_of: NDArray[np.int32],
        opening: NDArray[np.uint64],
        marks: NDArray[np.uint64],
    ) -> None: ...

class Served:
    """Outcome of the requests of a step."""

    @property
    def held(self) -> int:
        """Distinct pages that the cache had."""

    @property
    def read(self) -> int:
        """Distinct pages that were read."""

    @property
    def slow(self) -> int:
        """Distinct pages that the slow lane has read."""

    @property
    def lost(self) -> int:
        """Pages without an answer."""

    @property
    def bytes(self) -> list[int]:
        """Bytes that the fast lane has read from each device."""

    @property
    def places(self) -> NDArray[np.int32]:
        """Places of the latest request, which are taken."""

    @property
    def overdue(self) -> list[tuple[Batch, NDArray[np.uint16], NDArray[np.uint32]]]:
        """Reads that missed their deadline: device and length of each request."""

class MissService:
    """Answers to a device that lacks pages in a step.

    A thread takes requests in the order of their tickets. Between :meth:`arm` and :meth:`disarm`
    nobody else uses the ``cache``. Pages are read by the ``engine`` if that is a native one, and if
    that fails by who calls :meth:`next` and :meth:`answer`. A request is answered within twice
    ``deadline_s``.
    """

    def __init__(
        self,
        cache: PageCache,
        mail: Mailbox,
        stored: StoredPages,
        engine: ThreadsEngine | UringEngine | None,
        joined: bool,
        deadline_s: float,
    ) -> None: ...
    def arm(self, rows: list[NDArray[np.int64]], stripes: Stripes | None) -> int:
        """Begin a step whose rows have these slots; ``stripes`` None: all is read slowly.

        Tickets of the step are counted from the answer; 0: the service has ended.
        """

    def disarm(self) -> Served:
        """End the step, after the request under way."""

    @property
    def answered(self) -> int:
        """Requests answered since the start."""

    def next(self, timeout_s: float) -> tuple[NDArray[np.int64], NDArray[np.int32]] | None:
        """Keys of pages to be read, and their places; None: there are none in this time."""

    def answer(self, states: NDArray[np.uint8], devices: NDArray[np.uint16]) -> None:
        """Answer to :meth:`next`, of each page: 0 it did not come, 1 it is right, 2 it did not
        come, and the caller keeps its place; and the device."""

    def close(self) -> None:
        """End the thread."""
