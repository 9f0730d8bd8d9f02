"""Weights of devices: those out of use, and the share of new slots of the others."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from typing import Final, Protocol

from vllm_ssdkv.base.errors import StoreFailedError

logger = logging.getLogger(__name__)

_SCHEDULER: Final = -1
"""Rank of a device that the scheduler has given up; it does not return."""


class WeightedPlacement(Protocol):
    """Placement whose devices have weights."""

    @property
    def weights(self) -> Sequence[float]:
        """Share of each device in new slots."""

    def reweigh(self, weights: Sequence[float]) -> None:
        """Give devices other shares."""

    def mask_lost(self) -> int:
        """Find nothing that lies on devices out of use only; how many blocks."""

    def take_returned(self) -> int:
        """Have the slots again that devices which are back in use had taken with them; how many
        blocks are found again."""

    def step(self) -> None:
        """Go on with what is under way."""


class DeviceWeights:
    """Health and speed of devices as the workers tell them. Used by the scheduler's thread."""

    def __init__(self, rebalancer: WeightedPlacement, paths: Sequence[str], return_s: float = 0.0):
        """``return_s``: seconds in which devices that went may come back; 0: they do not."""
        self.paths = tuple(paths)
        self._return_s, self._lost_at = return_s, 0.0
        self._rebalancer = rebalancer
        self._lost: dict[int, set[int]] = {}
        """Ranks that have lost each device which is out of use."""
        # Weights of the devices as configured, and what each rank says they are worth of it.
        self._weights = tuple(rebalancer.weights)
        self._worth: dict[tuple[int, int], float] = {}
        self._even = False

    def mark_lost(self, device: int, rank: int = 0) -> None:
        """A device is out of use for a rank: what lies nowhere else is not found until it is back.
        Takes time that grows with the store, once."""
        if device in self._lost:
            self._lost[device].add(rank)
            return
        self._lost[device] = {rank}
        self._lost_at = time.monotonic()
        self.reweigh()
        masked = self._rebalancer.mask_lost()
        self._rebalancer.step()
        logger.error("ssdkv: %d stored blocks on %s are out of reach", masked, self.paths[device])

    def leave(self, devices: Collection[int]) -> None:
        """Use devices no more until restart: nothing can be written to them, and requests need
        what they compute. Takes time that grows with the store.

        Raises:
            StoreFailedError: there would be none left.
        """
        paths = ", ".join(self.paths[device] for device in sorted(devices))
        others = {device for device, weight in enumerate(self._weights) if weight}
        if not others - set(devices) - self._lost.keys():
            raise StoreFailedError(
                f"nothing can be written to {paths}, and there is no other device: free space "
                "there, or replace what fails, and restart"
            )
        for device in sorted(devices):
            logger.error(
                "ssdkv: device %s is out of use until restart: nothing can be written to it, and "
                "no request can run",
                self.paths[device],
            )
            self.mark_lost(device, _SCHEDULER)

    def mark_returned(self, device: int, rank: int) -> None:
        """A device is in use again for a rank; for the store when all ranks have it.
        Takes time that grows with the store, then."""
        ranks = self._lost.get(device, set())
        ranks.discard(rank)
        if ranks or device not in self._lost:
            return
        del self._lost[device]
        self.reweigh()
        found = self._rebalancer.take_returned()
        self._rebalancer.step()
        logger.warning(
            "ssdkv: %s has its share of new blocks again, %d stored blocks are in reach again",
            self.paths[device],
            found,
        )

    @property
    def lost(self) -> frozenset[int]:
        """Devices out of use."""
        return frozenset(self._lost)

    @property
    def may_return(self) -> bool:
        """Check whether devices out of use may be back soon."""
        return bool(self._lost) and time.monotonic() - self._lost_at < self._return_s

    def update(self, rank: int, worth: Sequence[tuple[int, float]]) -> None:
        """A rank says which part of their weight (device, part) devices are worth."""
        if self._even:
            return
        for device, part in worth:
            self._worth[rank, device] = part
        if worth:
            self.reweigh()

    def reset(self) -> bool:
        """Give slow devices their configured share back, until restart: what they are spared is
        room that a request needs. False when that changes nothing.
        """
        if all(part == 1.0 for part in self._worth.values()):
            return False
        logger.warning(
            "ssdkv: the store is too small to spare slow devices: all get their whole share again"
        )
        self._even = True
        self._worth.clear()
        self.reweigh()
        return True

    def reweigh(self) -> None:
        """Give devices the share of new slots that they are worth: to their slowest rank."""
        weights = [0.0 if d in self._lost else w for d, w in enumerate(self._weights)]
        for device in range(len(weights)):
            told = [worth for (_, d), worth in self._worth.items() if d == device]
            weights[device] *= min(told, default=1.0)
        self._rebalancer.reweigh(weights)

    def lost_paths(self) -> str:
        """The devices out of use, for messages."""
        return ", ".join(self.paths[d] for d in sorted(self._lost)) or "none"
