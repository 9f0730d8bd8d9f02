"""Types of the native module ``_io`` (sources in csrc/io and csrc/cache).

Every call that waits or moves bytes releases the GIL.
"""

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
    """Native part of :class:`vllm_ssdkv.store.cache.FrameCache`; states are its ``FrameState``.

    Thread-safe. Raises IndexError for slots and frames that do not exist, TypeError for another
    dtype or a strided array, and changes nothing when it raises.
    """

    def __init__(self, frames: int, slots: int) -> None: ...
    def state(self, frame: int) -> int: ...
    def frame_of(self, slot: int) -> int: ...
    def count(self, states: list[int]) -> int: ...
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

    def start_writing(self, slots: NDArray[np.int64]) -> NDArray[np.int32]: ...
    def settle(self, frames: NDArray[np.int32], state: int) -> None: ...
    def abandon(self, frames: NDArray[np.int32]) -> None: ...
    def forget(self, slots: NDArray[np.int64]) -> None: ...
    def audit(self) -> None:
        """RuntimeError unless all tables agree. For tests: looks at everything."""

class Batch:
    """Native :class:`vllm_ssdkv.store.engine.protocol.Batch`."""

    def done(self) -> bool: ...
    def wait(self, timeout_s: float) -> bool: ...
    def results(self) -> NDArray[np.int32]: ...
    def notify(self, eventfd: int) -> None:
        """Add 1 to ``eventfd`` when all is done, at once if it is, from the thread that ends it.

        For event loops, which cannot block in ``wait``. The descriptor is duplicated. Raises
        ValueError on a second call, RuntimeError if the descriptor is not open.
        """

class ThreadsEngine:
    """Native part of :class:`vllm_ssdkv.store.engine.threads.ThreadsEngine`.

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
    ) -> Batch: ...
    def statistics(self) -> dict[str, int]: ...
    def close(self, timeout_s: float) -> bool: ...

has_uring: bool
"""Whether the build had liburing; without it ``UringEngine`` and ``UringSetup`` do not exist."""

class UringSetup:
    """What the kernel let one ring have; ``errno`` 0 is success."""

    @property
    def task_run(self) -> str: ...
    @property
    def register_files_errno(self) -> int: ...
    @property
    def register_buffers_errno(self) -> int: ...

class UringEngine:
    """Native part of :class:`vllm_ssdkv.store.engine.uring.UringEngine`.

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
