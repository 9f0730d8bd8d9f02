"""Suspension of the store: nothing is found and nothing new is stored, and nothing is lost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from vllm_ssdkv.base.errors import StoreError, StoreFailedError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.store.index.slot_index import SlotIndex

logger = logging.getLogger(__name__)


class Suspension:
    """True if the store is suspended. Used by the scheduler's thread.

    In page mode requests go on, with slots that are free: what is stored is not evicted for them.
    """

    def __init__(
        self,
        index: SlotIndex | None,
        counters: Counters,
        save: Callable[[str], None],
        places: Sequence[Path],
        reason: str = "",
        way_out: str = "",
    ):
        """
        Args:
            index: Of the store in this process, if it has one: nothing is evicted from it.
            counters: Where the state is told.
            save: Has the store opened as suspended, for a reason. Blocks briefly.
            places: Directories of the store, for the text that names the way out.
            reason: Why the store was suspended when it was opened; empty: it was not.
            way_out: What to do then, where the store is no directory of this engine.
        """
        self._index, self._counters, self._save = index, counters, save
        named = " ".join(map(str, places))
        self.way_out = way_out or (
            f"`ssdkv resume {named}` takes the store back as it is, `ssdkv rm {named}` gives it "
            "up; either while no engine runs on it"
        )
        self.reason = ""
        counters.set("store_suspended", 0.0)
        if reason:
            self._set(reason)

    def __bool__(self) -> bool:
        """Check whether it is."""
        return bool(self.reason)

    def no_room(self) -> StoreFailedError:
        """The error of a request that finds no room in a suspended store of page mode."""
        return StoreFailedError(
            "the store is suspended and has no room for a request beside what it keeps: "
            f"{self.way_out}"
        )

    def begin(self, reason: str) -> None:
        """Suspend the store, also for later starts. Once; later reasons change nothing."""
        if self.reason:
            return
        self._set(reason)
        try:
            self._save(reason)
        except StoreError as error:
            self._counters.add("suspensions_not_saved")
            logger.error(  # noqa: TRY400 - the text says it all
                "ssdkv: a later start will not know that the store is suspended: %s", error
            )

    def _set(self, reason: str) -> None:
        self.reason = reason
        self._counters.set("store_suspended", 1.0)
        if self._index is not None:
            self._index.pin(self._index.order())
        logger.error(
            "ssdkv: THE STORE IS SUSPENDED: %s. Nothing is found in it or added to it; what was "
            "stored up to the last good verified hit is still there: %s",
            reason,
            self.way_out,
        )
