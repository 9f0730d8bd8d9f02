"""The one way to read slots: each byte once, checked, and read again only where it was wrong.

Loads, streams, fetches of single pages and scrubs all read this way. They differ in where the
digests come from (:mod:`vllm_ssdkv.store.io.digest_source`), in who checks what has arrived
(the caller, native code, or a thread beside it), and in whether anything is read again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv import _io
from vllm_ssdkv.store.integrity.slot_codec import Digests
from vllm_ssdkv.store.io.arrival_verifier import (
    RIGHT,
    WRONG_HEADER,
    WRONG_PAGE,
    make_arrival_verifier,
)
from vllm_ssdkv.store.io.async_verifier import AsyncVerifier, Verification
from vllm_ssdkv.store.io.buffer_pool import BufferPool
from vllm_ssdkv.store.io.digest_source import DigestSource, HeaderDigests, SlotExtents, Which
from vllm_ssdkv.store.io.engines.protocol import U64, Op
from vllm_ssdkv.store.io.slot_io import ReadFrom, SlotIO
from vllm_ssdkv.store.io.slot_request import SlotRequest
from vllm_ssdkv.store.io.thread_errors import ThreadErrors

logger = logging.getLogger(__name__)

_ALL: Final = slice(None)
"""All extents, as views: most reads need no copies."""

_NAMED: Final = 8
"""Slots that a line of the log names at most."""

_NONE: Which = np.zeros(0, dtype=np.intp)


@dataclass(frozen=True, slots=True, eq=False)
class _Checked:
    """Extents ``which`` [k] that were checked: whether their digests are ``known`` [k], and which
    pages are the ``same`` [k, pages]."""

    which: Which | slice
    known: NDArray[np.bool_]
    same: NDArray[np.bool_]


Holders = Sequence[tuple[SlotRequest, NDArray[np.bool_]]]
"""Reads in flight, and the extents, [n], whose memory each may still write to."""


def union(holders: Holders, extents: int) -> NDArray[np.bool_]:
    """Extents, [extents], whose memory any of these reads may still write to."""
    mask = np.zeros(extents, dtype=np.bool_)
    for _, held in holders:
        mask |= held
    return mask


@dataclass(slots=True, eq=False)
class _Marks:
    """Findings of a read that is checked in parts, or of which something is wrong.

    Attributes:
        seen: Extents that arrived, and were checked, [n].
        known: Extents whose digests are known, [n].
        left: Pages of extents that are not good that have not been right yet, [n, pages].
        wrong: Pages of these that arrived, and were not right, [n, pages].
        bad, unread, hanging: See :class:`VerifiedRead`, [n].
    """

    seen: NDArray[np.bool_]
    known: NDArray[np.bool_]
    left: NDArray[np.bool_]
    wrong: NDArray[np.bool_]
    bad: NDArray[np.bool_]
    unread: NDArray[np.bool_]
    hanging: NDArray[np.bool_]

    @classmethod
    def none(cls, extents: int, pages: int) -> _Marks:
        """Marks of a read that was not looked at."""
        seen, known, bad, unread, hanging = np.zeros((5, extents), dtype=np.bool_)
        wrong = np.zeros((extents, pages), dtype=np.bool_)
        return cls(seen, known, ~wrong, wrong, bad, unread, hanging)


class VerifiedRead:
    """Extents on their way into the arena. One thread uses it, unless a method says otherwise.

    First :meth:`parts`, or :meth:`verify_beside`, or neither; then :meth:`finish`, or
    :meth:`stop` for a read that nobody waits for; then :meth:`holders` say which memory is not
    free yet. No wait is longer than the deadline of I/O.

    Attributes:
        extents: What is read.
        request: The first read of it.
        good: Extents that are right, bool [n].

    Example:
        read = VerifiedRead(files, extents, TableDigests(table, extents))
        good = read.finish()
    """

    def __init__(
        self,
        files: SlotIO,
        extents: SlotExtents,
        source: DigestSource,
        *,
        read_from: ReadFrom | None = None,
        coalesced: bool = False,
        merged: bool = True,
        charge: bool = True,
        errors: ThreadErrors | None = None,
    ):
        """Start to read.

        Args:
            files: The slots.
            extents: What to read.
            source: Of the digests.
            read_from: The copies that are read first. Default: those that are likely right.
            coalesced: As in :meth:`SlotIO.submit`, ``merged`` too.
            charge: Whether devices and copies are told what was found, and the log what is bad. If
                not, that is for :meth:`charge_devices`.
            errors: Counts what is raised where a read is asked which memory it holds: then it
                holds all. Default: that is raised.

        Raises:
            ValueError: the extents are not in the slots.
        """
        geometry = files.geometry
        self._files = files
        self.extents = extents
        self._source = source
        self.request = files.submit(
            Op.READ,
            extents.slots,
            extents.offset(geometry),
            extents.nbytes(geometry),
            extents.at,
            source=read_from,
            coalesced=coalesced,
            merged=merged,
        )
        self._charge = charge
        self._errors = errors
        self.good = np.zeros(len(extents.slots), dtype=np.bool_)
        self._made: _Marks | None = None
        """None where nothing was looked at, or all of it at once, and is right."""
        self._later: list[tuple[SlotRequest, Which]] = []
        """Reads of what was wrong, and the extent of each of their slots."""
        self._beside: Verification[_Checked] | None = None
        self._arrivals: _io.ArrivalVerifier | None = None

    # ---- checks while it arrives ----

    def prepare(self, addresses: U64, blocks: U64, stretches: _io.Stretches) -> None:
        """Have native code check extents as they arrive, and copy them to HBM ``blocks`` [n], 0 for
        none, where checksums are all that it takes. ``addresses`` are those of ``at``."""
        if self._arrivals is None and isinstance(self._source, HeaderDigests):
            self._arrivals = make_arrival_verifier(
                self.request, self._source.epochs, self._source.keys, addresses, blocks, stretches
            )

    @property
    def prepared(self) -> bool:
        """Check whether native code checks and copies."""
        return self._arrivals is not None

    def parts(self, beside: Sequence[SlotRequest] = ()) -> Iterator[Which]:
        """Extents as they become good, each once, before any is read again. Blocks until the first
        read has ended; those that native code has copied come at its end.

        Args:
            beside: As in :meth:`SlotRequest.wait`.
        """
        if self._arrivals is not None:
            self.request.feed(self._arrivals, beside)
            self._take_in(self._arrivals)
            yield np.flatnonzero(self.good)
            return
        for part in self.request.arriving(beside):
            self._take(self.request, part, self._check(part, final=False), final=False)
            yield part[self.good[part]]

    def find_digests(self, which: Which) -> None:
        """Have the source of the digests look at extents that native code has checked."""
        if len(which):
            self._source.digests(which)

    def verify_beside(self, verifier: AsyncVerifier) -> None:
        """Have a thread check all of it as soon as it has arrived."""
        self._beside = verifier.after(self.request.batch, self._check_arrived)

    def _check_arrived(self) -> _Checked:
        arrived = self.request.readable()
        return self._check(_ALL if arrived.all() else np.flatnonzero(arrived), final=False)

    # ---- the end ----

    def over(self) -> bool:
        """Check whether :meth:`finish` has nothing to wait for, unless something is read again."""
        return self.request.over(0.0)

    def finish(
        self,
        beside: Sequence[SlotRequest] = (),
        *,
        again: bool = True,
    ) -> NDArray[np.bool_]:
        """Wait for all of it, and read again what is wrong; which extents are good, [n].

        Args:
            beside: As in :meth:`SlotRequest.wait`.
            again: Whether to :meth:`read_again`. Before that nothing is bad, and no device is
                charged with what has no other copy.

        Raises:
            StoreError: the thread beside did not end in time.
        """
        checked = None
        if self._beside is not None:
            checked = self._beside.take(self._files.deadline_s)
        arrived = self.request.wait(beside)
        if checked is None and not self.good.all():
            if self._made is None and arrived.all():
                checked = self._check(_ALL, final=False)
            elif len(rest := np.flatnonzero(arrived & ~self._marks.seen)):
                checked = self._check(rest, final=False)
        if checked is not None:
            self._take(self.request, checked.which, checked, final=False)
        if again and not self.good.all():
            self.read_again(time.monotonic() + self._files.deadline_s)
        else:
            self._clear_failures()
        return self.good

    def stop(self) -> None:
        """Nobody touches the memory any more but the devices.

        Raises:
            StoreError: the thread beside did not end in time.
        """
        if self._beside is not None:
            self._beside.stop(self._files.deadline_s)

    def holders(self) -> Holders:
        """Reads that may still write to the memory of extents, and of which, [n]; none twice."""
        if not self._later:
            held = self._held_by(self.request)
            return [(self.request, held)] if held.any() else []
        found = []
        rest = np.ones(len(self.good), dtype=np.bool_)
        # Nothing is read again before the read before it has ended: the latest one counts.
        for request, of in reversed(self._later):
            mask = np.zeros(len(rest), dtype=np.bool_)
            mask[of[self._held_by(request)]] = True
            if (mask := mask & rest).any():
                found.append((request, mask))
            rest[of] = False
        if (mask := self._held_by(self.request) & rest).any():
            found.append((self.request, mask))
        return found

    def held(self) -> NDArray[np.bool_]:
        """Extents whose memory some read may still write to, [n]."""
        return union(self.holders(), len(self.good))

    def _held_by(self, request: SlotRequest) -> NDArray[np.bool_]:
        if self._errors is None:
            return request.held()
        with self._errors.swallowed("the memory of a read is out of use until its end is known"):
            return request.held()
        return np.ones(len(request.slots), dtype=np.bool_)

    def give_back(self, pool: BufferPool) -> None:
        """Return the memory to the pool that it is from, as soon as no read holds it.

        Raises:
            StoreError: as :meth:`stop`.
        """
        self.stop()
        at, holders = self.extents.at, self.holders()
        for request, held in holders:
            pool.lend(at[held], held[held], request)
        pool.give(at[~union(holders, len(at))])

    # ---- findings ----

    @property
    def _marks(self) -> _Marks:
        if self._made is None:
            self._made = _Marks.none(len(self.good), self.extents.pages)
            self._made.seen[:] = self.good
        return self._made

    @property
    def bad(self) -> NDArray[np.bool_]:
        """Extents that are wrong wherever they were read from, or could not be read for so long
        that they are given up, [n]."""
        return self._marks.bad

    @property
    def unread(self) -> NDArray[np.bool_]:
        """Extents that devices in use could not read, and may read again later, [n]."""
        return self._marks.unread

    @property
    def hanging(self) -> NDArray[np.bool_]:
        """Extents whose read held their memory beyond its deadline, while there is a copy in reach
        to read elsewhere, [n]."""
        return self._marks.hanging

    @property
    def arrived(self) -> NDArray[np.bool_]:
        """Extents of which the latest read has brought all, [n], so that they were checked."""
        return self._marks.seen

    @property
    def wrong(self) -> NDArray[np.bool_]:
        """Pages of extents that are not good that arrived, and do not match, [n, pages]."""
        return self._marks.wrong

    def charge_devices(self) -> None:
        """Tell devices and copies what the first read, and no other, has found. Any thread."""
        self.request.verified(self.good, *self._wrong_at(_ALL))

    def why(self, which: int) -> str:
        """Fault of an extent that is not good."""
        if not self._marks.seen[which]:
            return "it cannot be read"
        if not self._marks.known[which]:
            return self._source.why_refused(which)
        return f"{int(self._marks.wrong[which].sum())} page(s) do not match their checksums"

    # ---- checks ----

    def _check(self, which: Which | slice, *, final: bool) -> _Checked:
        """Check extents that have arrived, and make their pages readable. Any thread."""
        extents = self.extents
        digests, known = self._source.digests(which)
        if extents.pages == 0:
            return _Checked(which, known, np.zeros((len(known), 0), dtype=np.bool_))
        at, numbers = extents.at[which], extents.numbers(which)
        if extents.headed:
            at = at + np.uint64(extents.before_pages(self._files.geometry))
        if known.all():
            return _Checked(which, known, self._unseal(digests, numbers, at, final=final))
        same = np.zeros((len(known), extents.pages), dtype=np.bool_)
        if known.any():
            numbers = numbers if isinstance(numbers, int) else numbers[known]
            same[known] = self._unseal(digests.part(known), numbers, at[known], final=final)
        return _Checked(which, known, same)

    def _unseal(
        self, digests: Digests, numbers: int | NDArray[np.int64], at: U64, *, final: bool
    ) -> NDArray[np.bool_]:
        """Pages of these numbers on, one for all or one each, that are right, [k, pages]."""
        codec = self._source.codec
        if isinstance(numbers, int) or not self._files.geometry.encrypted:
            first = numbers if isinstance(numbers, int) else 0
            return codec.unseal(digests, first, at, final=final)
        # A page's number is in its nonce, and one call opens pages of one number.
        same = np.zeros(digests.marks.shape[:2], dtype=np.bool_)
        for number in np.unique(numbers).tolist():
            mine = np.flatnonzero(numbers == number)
            same[mine] = codec.unseal(digests.part(mine), number, at[mine], final=final)
        return same

    def _take(
        self, request: SlotRequest, place: Which | slice, checked: _Checked, *, final: bool
    ) -> None:
        """Extents, which are ``place`` [k] of a request, were checked."""
        which, known, same = checked.which, checked.known, checked.same
        right = same.all(axis=1) & known
        all_right = bool(right.all())
        if isinstance(which, slice) and all_right:
            self.good, told = right, right
        else:
            self.good[which] = right
            told = np.zeros(len(request.slots), dtype=np.bool_)
            told[place] = right
        if self._made is not None or not all_right or not isinstance(which, slice):
            self._marks.seen[which] = True
        if all_right:
            if self._charge:
                request.verified(told, _NONE, _NONE, final=final)
            return
        if isinstance(place, slice):
            place = np.arange(len(known), dtype=np.intp)
        self._marks.known[which], self._marks.left[which] = known, ~same
        self._marks.wrong[which] = ~same & known[:, None]
        if not self._charge:
            return
        if self.extents.headed and not known.all():
            request.wrong_headers(place[~known])
        row, offsets = self._wrong_at(which)
        request.verified(told, place[row], offsets, final=final)

    def _wrong_at(self, which: Which | slice) -> tuple[Which, NDArray[np.int64]]:
        """Wrong pages of some extents: the place of each one's extent in them, and where it begins,
        in bytes, both [k]."""
        row, page = np.nonzero(self._marks.wrong[which])
        before = self.extents.before_pages(self._files.geometry)
        return row, before + page * self._files.geometry.page_bytes

    def _take_in(self, verifier: _io.ArrivalVerifier) -> None:
        """As :meth:`_take`, of all that native code has looked at."""
        states = verifier.states()
        if (right := states == RIGHT).all():
            same = np.ones((len(states), self.extents.pages), dtype=np.bool_)
            self._take(self.request, _ALL, _Checked(_ALL, right, same), final=False)
            return
        which = np.flatnonzero(np.isin(states, (RIGHT, WRONG_HEADER, WRONG_PAGE)))
        known = states[which] != WRONG_HEADER
        same = np.repeat(known[:, None], self.extents.pages, axis=1)
        row, page = verifier.wrong_pages().reshape(-1, 2).T
        same[np.searchsorted(which, row), page] = False
        self._take(self.request, which, _Checked(which, known, same), final=False)

    # ---- once more ----

    def read_again(self, until: float) -> None:
        """Read what is wrong, from wherever it may be right. The first read is over.

        Once more in any case: the block layer fails neighbours of a bad sector too. As long as that
        makes any page right, the others may be elsewhere: one copy of a slot may have one page
        wrong, and the other copy another one.

        Args:
            until: Time of the monotonic clock from which on no other read is begun: what is left
                then is not good, but not bad either.
        """
        hopeless = self._marks.seen & ~self._marks.known & ~self.good & (not self.extents.headed)
        tried = np.flatnonzero(self._open() & ~hopeless)
        in_time = self._try_sources(tried, until)
        self._clear_failures()
        held, in_reach = self.held(), ~self.request.out_of_reach()
        self._marks.hanging = held & ~self.good & in_reach
        if not in_time:
            return
        # What came, and is wrong, is wrong wherever its device is now.
        wrong = ~self.good & ~held & (in_reach | self._marks.seen)
        # A device may read again what it could not read: it is tried again later.
        unread = wrong & ~self._marks.seen
        if unread.any():
            begin, end = self._reach(unread)
            wrong[unread] = self._files.health.give_up(self.extents.slots[unread], begin, end)
        self._marks.unread = unread & ~wrong
        self.bad[tried] = wrong[tried]
        self._marks.bad |= hopeless
        if self._charge and self.bad.any():
            self._report()

    def _clear_failures(self) -> None:
        """Forget failures of what can be read again."""
        health = self._files.health
        if health.any_unreadable and self.good.any():
            health.readable(self.extents.slots[self.good], *self._reach(self.good))

    def _reach(self, which: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Bytes of their slots at which these extents begin and end, both [k]."""
        geometry = self._files.geometry
        begin = np.broadcast_to(self.extents.offset(geometry), len(which))[which]
        return begin, begin + self.extents.nbytes(geometry)

    def _try_sources(self, left: Which, until: float) -> bool:
        """Read these extents from one source after the other; whether there was time for it."""
        while len(left):
            lacking = self._lacking(left)
            for source in self._sources(left):
                rows = left[self._open()[left]]
                if source is not None:
                    rows = rows[self._files.placement.doubled(self.extents.slots[rows])]
                if len(rows) == 0:
                    break
                if time.monotonic() >= until:
                    return False
                self._once_more(rows, source)
            left = left[self._open()[left] & (self._lacking(left) < lacking)]
        return True

    def _open(self) -> NDArray[np.bool_]:
        """Extents that can be read again: nobody holds their memory, and a copy is in reach."""
        return ~self.good & ~self.held() & ~self.request.out_of_reach()

    def _lacking(self, which: Which) -> NDArray[np.int64]:
        """Count the parts of each extent that have not been right yet."""
        lacking: NDArray[np.int64] = self._marks.left[which].sum(axis=1) + ~self._marks.known[which]
        return lacking

    def _sources(self, which: Which) -> list[ReadFrom | None]:
        """Sources to read extents from again, one after the other.

        Where any of them has two copies, also without each of their devices: a page that lies on
        two of them charges neither, and behind a wrong header nothing is known of the pages.
        """
        geometry, offset = self._files.geometry, self.extents.offset(self._files.geometry)
        first, second = self._files.placement.copies(
            self.extents.slots[which],
            offset if isinstance(offset, int) else offset[which],
            self.extents.nbytes(geometry),
        )
        if second is None:
            return [None]
        doubled = first.device != second.device
        devices = np.union1d(first.device[doubled], second.device[doubled]).tolist()
        return [None, *(ReadFrom(without=(device,)) for device in devices)]

    def _once_more(self, which: Which, source: ReadFrom | None) -> None:
        """Read extents of which nothing was right as a whole, and single pages of the others."""
        geometry, extents = self._files.geometry, self.extents
        nothing = ~self._marks.known[which] | self._marks.left[which].all(axis=1)
        if len(whole := which[nothing]):
            offset = extents.offset(geometry)
            request = self._files.submit(
                Op.READ,
                extents.slots[whole],
                offset if isinstance(offset, int) else offset[whole],
                extents.nbytes(geometry),
                extents.at[whole],
                source=source,
                again=True,
            )
            self._later.append((request, whole))
            arrived = np.flatnonzero(request.wait())
            self._marks.seen[whole], self._marks.wrong[whole] = False, False
            if len(arrived):
                checked = self._check(whole[arrived], final=True)
                self._take(request, arrived, checked, final=source is None)
        if len(parts := which[~nothing]):
            self._pages_once_more(parts, source)

    def _pages_once_more(self, which: Which, source: ReadFrom | None) -> None:
        """Read pages that are wrong, of extents with others that are right."""
        geometry, extents = self._files.geometry, self.extents
        digests, known = self._source.digests(which)
        row, page = np.nonzero(self._marks.left[which] & known[:, None])
        numbers = extents.numbers(which[row]) + page
        before = extents.before_pages(geometry) + page * geometry.page_bytes
        at = extents.at[which[row]] + before.astype(np.uint64)
        request = self._files.submit(
            Op.READ,
            extents.slots[which[row]],
            geometry.header_bytes + numbers * geometry.page_bytes,
            geometry.page_bytes,
            at,
            source=source,
            again=True,
        )
        self._later.append((request, which[row]))
        arrived = request.wait()
        marks = digests.marks[row[arrived], page[arrived]][:, None]
        mine = Digests(digests.opening[row[arrived]], marks)
        right = np.zeros(len(row), dtype=np.bool_)
        if arrived.any():
            right[arrived] = self._unseal(mine, numbers[arrived], at[arrived], final=True)[:, 0]
        self._marks.wrong[which[row], page] = arrived & ~right
        self._marks.left[which[row], page] = ~right
        self.good[which] = known & ~self._marks.left[which].any(axis=1)
        wrong = np.flatnonzero(arrived & ~right)
        if self._charge:
            offsets = np.zeros(len(wrong), dtype=np.int64)
            request.verified(right, wrong, offsets, final=source is None)

    def _report(self) -> None:
        """Count and log what is bad, once."""
        slots, counters = self.extents.slots, self._files.counters
        wrong = self._marks.wrong[self.bad].sum()
        if wrong:
            counters.add("checksum_failures", int(wrong))
        headed = np.flatnonzero(self.bad & self.extents.headed)
        counters.add(
            "header_mismatches", int((self._marks.seen & ~self._marks.known)[headed].sum())
        )
        for which in headed[:_NAMED].tolist():
            slot, pages = int(slots[which]), int(self._marks.wrong[which].sum())
            if pages:
                logger.error(
                    "ssdkv: slot %d is dropped: %d page(s) do not match their checksums",
                    slot,
                    pages,
                )
            else:
                logger.error("ssdkv: slot %d is dropped: %s", slot, self.why(which))
        bad = np.unique(slots[self.bad]).tolist()
        if len(bad) > len(headed[:_NAMED]):
            logger.error(
                "ssdkv: %d slot(s) cannot be read or do not match their checksums, and are "
                "dropped: %s",
                len(bad),
                bad[:_NAMED],
            )
