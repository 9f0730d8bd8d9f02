"""Recovery of the journal at a start: read it, refuse it, or begin anew.

One step of a start; ``store/open.py`` (``open_index``) has all of them in order.
``strict`` refuses a damaged journal, ``quiet`` goes on with what is whole, ``none`` reads nothing.
One of another format version is no damage: unless nothing is read, it is refused, and stays as it
is for the release that made it.
A record that was cut at the end of the file is no damage: a kill or a power loss in the middle of
an append leaves it, and nobody was told that it is safe.

What a journalled block holds is trusted only when it is read, by its header and checksums
(``store/io/verified_read.py``). A journal that is lost with its drive is made anew from the
headers of slots (``store/maintenance/journal_rebuild.py``), a manifest from its copies
(``store/location.py``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Literal, TypeAlias
from uuid import UUID

from vllm_ssdkv._index import Replay
from vllm_ssdkv.base.errors import FormatError
from vllm_ssdkv.store.format.journal_record import (
    HEADER_BYTES,
    RECORD_BYTES,
    check_header,
    encode_header,
    refuse_another_version,
)
from vllm_ssdkv.store.index.journal_file import JournalFile

logger = logging.getLogger(__name__)

Recover: TypeAlias = Literal["strict", "quiet", "none"]

Progress: TypeAlias = Callable[[int, int], None]
"""Called with the bytes read so far and the bytes there are."""

WAY_OUT = (
    'check the store with `ssdkv fsck`, or set the option recover to "quiet" to go on without what '
    "is damaged"
)

LOG_INTERVAL_S = 3.0


class ProgressLog:
    """Logs how far a recovery is, every few seconds."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._next = time.monotonic() + LOG_INTERVAL_S

    def __call__(self, done: int, total: int) -> None:
        """Called after each piece."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + LOG_INTERVAL_S
            logger.info("%s: %d %% of %d MiB read", self._what, 100 * done // total, total >> 20)


def recover_journal(
    file: JournalFile,
    *,
    store: UUID,
    fingerprint: bytes,
    num_slots: int,
    recover: Recover,
    progress: Progress | None,
) -> tuple[Replay, bool]:
    """Read the file, or start it anew, and set its end. Blocks; memory is bounded by the slots.

    Args:
        file: The open, locked file.
        store: Identity of the store.
        fingerprint: :attr:`Fingerprint.digest`.
        num_slots: Slots of the store.
        recover: What to do with damage; see the module's text.
        progress: Told of every few MiB read.

    Returns:
        What it says, and whether a file was set aside as ``<name>.rejected`` (one is kept).

    Raises:
        FormatError: ``strict``, and the file is damaged or not this store's; or it is of another
            version.
        OSError: it cannot be read or started.
    """
    replay = Replay(num_slots)
    total = file.size()
    if total and not _is_usable(file, store, fingerprint, recover):
        file.set_aside(file.path.name + ".rejected")
        file.start(encode_header(store, fingerprint))
        return replay, True
    if not total:
        file.start(encode_header(store, fingerprint))
        return replay, False
    done = HEADER_BYTES
    for piece in file.pieces(HEADER_BYTES):
        replay.feed(piece)
        done += len(piece)
        if progress is not None:
            progress(done, max(done, total))
    # An incomplete last record lies behind the end: the next one overwrites it.
    file.end = HEADER_BYTES + (done - HEADER_BYTES) // RECORD_BYTES * RECORD_BYTES
    if replay.damaged and recover == "strict":
        raise FormatError(
            f"journal {file.path}: {replay.damaged} of its {replay.records + replay.corrupt} "
            f"records are damaged: {WAY_OUT}"
        )
    return replay, False


def _is_usable(file: JournalFile, store: UUID, fingerprint: bytes, recover: Recover) -> bool:
    if recover == "none":
        logger.warning(
            'journal %s: recover is "none": kept as %s.rejected, the store starts empty',
            file.path,
            file.path.name,
        )
        return False
    header = file.header(HEADER_BYTES)
    refuse_another_version(header, file.path)
    try:
        check_header(header, store, fingerprint)
    except FormatError as exc:
        if recover == "strict":
            raise FormatError(f"{file.path}: {exc}: {WAY_OUT}") from exc
        logger.warning(
            "%s is not the journal of this store (%s): kept as %s.rejected, starting empty",
            file.path,
            exc,
            file.path.name,
        )
        return False
    return True
