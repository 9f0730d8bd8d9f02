"""Loads: those of hits, which requests wait for, and those in the background."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.connector.messages import (
    BACKGROUND,
    INTO_DRAM,
    PROMOTION,
    Load,
    RankReport,
)
from vllm_ssdkv.connector.scheduler.background_loads import BackgroundLoads
from vllm_ssdkv.connector.scheduler.kv_groups import GroupLoad
from vllm_ssdkv.connector.scheduler.load_or_recompute import LoadOrRecompute
from vllm_ssdkv.connector.scheduler.load_retries import LoadRetries
from vllm_ssdkv.connector.scheduler.request_identities import RequestIdentities
from vllm_ssdkv.connector.scheduler.request_overrides import RequestOverrides
from vllm_ssdkv.connector.scheduler.request_state import RequestState
from vllm_ssdkv.connector.scheduler.step_draft import StepDraft
from vllm_ssdkv.store.tier import TierIndex

if TYPE_CHECKING:
    from vllm.v1.request import Request


class LoadQueue:
    """Loads that were planned and have not ended, by name. Used by the scheduler's thread.

    The name of a hit's load is its request's id. The slots of each are pinned until it has ended.

    Attributes:
        choice: Decides between loading and computing, by what loads have taken.
        retries: Requests whose load failed.
    """

    def __init__(
        self,
        choice: LoadOrRecompute,
        retries: LoadRetries,
        index: TierIndex,
        requests: Mapping[str, RequestState],
        identities: RequestIdentities,
        asked: RequestOverrides,
        draft: StepDraft,
    ):
        """``requests``: those that are admitted. ``draft`` takes the loads."""
        self.choice, self.retries = choice, retries
        self._index, self._requests, self._identities = index, requests, identities
        self._asked, self._draft = asked, draft
        self._under_way: dict[str, NDArray[np.int64]] = {}
        self._background = BackgroundLoads(index, identities.keys, self.start)

    def __len__(self) -> int:
        """Number of loads under way."""
        return len(self._under_way)

    def __contains__(self, name: object) -> bool:
        """Check whether the load with this name is under way."""
        return name in self._under_way

    @property
    def of_requests(self) -> bool:
        """Check whether a request's hit is under way."""
        return bool(self._under_way.keys() - BACKGROUND)

    @property
    def in_background(self) -> bool:
        """Check whether a load is under way that no request waits for."""
        return bool(self._under_way.keys() & BACKGROUND)

    def slots(self) -> set[int]:
        """Slots of all loads under way."""
        return {slot for slots in self._under_way.values() for slot in slots.tolist()}

    # ---- beginning ----

    def start(self, name: str, load: GroupLoad) -> None:
        """Put a load into the next plan. Its slots are pinned."""
        self._under_way[name] = load.slots
        self.choice.planned(name, load.slots)
        state, whole, adapter = self._requests.get(name), name in INTO_DRAM, None
        if state is not None:
            whole = not self._asked.chooses(name, state.request.num_prompt_tokens)
            adapter = self._identities.adapter_of(state.request)
        others, their_epochs = self._index.others(load.slots)
        self._draft.loads.append(
            Load(
                name,
                load.slots,
                self._index.epochs(load.slots),
                load.keys,
                load.block_ids,
                load.chain,
                load.behind,
                whole,
                adapter,
                load.compared,
                others,
                their_epochs,
            )
        )

    def probe(self, request: Request) -> None:
        """A request has been admitted: read a few blocks that it computes instead, if it is time to
        learn how long that takes."""
        unread = self.choice.admitted(request.request_id)
        if unread is not None:
            self._background.probe(request, unread)

    # ---- results ----

    def reported(self, rank: int, report: RankReport) -> list[str]:
        """Take in what a rank measured. Returns loads in the background that have ended."""
        ended = self.choice.reported(rank, report)
        if report.streamed and PROMOTION not in self._under_way:
            self._background.promote(self._requests, report.streamed)
        return ended

    def end(self, name: str) -> NDArray[np.int64] | None:
        """A load has ended on every rank: its slots, which are still pinned. None: it is none of
        these."""
        slots = self._under_way.pop(name, None)
        if slots is not None:
            self.choice.ended(name)
        return slots

    def failed(self, request_ids: Iterable[str]) -> list[str]:
        """Loads that failed. Returns requests that vLLM asks for again; others were given up."""
        again = [name for name in request_ids if name in self._requests]
        for name in again:
            self.retries.add(name)
        return again
