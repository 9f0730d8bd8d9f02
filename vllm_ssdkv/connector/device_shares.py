"""Which devices are out of use, and which share of new slots the others get."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_ssdkv.store.restripe import Restriper


class DeviceShares:
    """What the workers say of the devices. Used by the scheduler's thread."""

    def __init__(self, restriper: Restriper, paths: Sequence[str]):
        self.paths = tuple(paths)
        self._restriper = restriper
        self._lost: set[int] = set()
        # Weights of the devices as configured, and what each rank says they are worth of it.
        self._weights = tuple(restriper.weights)
        self._worth: dict[tuple[int, int], float] = {}

    def lose(self, device: int) -> bool:
        """A device is out of use; False when that was known. :meth:`reweigh` comes next."""
        if device in self._lost:
            return False
        self._lost.add(device)
        return True

    def value(self, rank: int, worth: Sequence[tuple[int, float]]) -> None:
        """A rank says which part of their weight (device, part) devices are worth."""
        for device, part in worth:
            self._worth[rank, device] = part
        if worth:
            self.reweigh()

    def reweigh(self) -> None:
        """Give devices the share of new slots that they are worth: to their slowest rank."""
        weights = [0.0 if d in self._lost else w for d, w in enumerate(self._weights)]
        for device in range(len(weights)):
            told = [worth for (_, d), worth in self._worth.items() if d == device]
            weights[device] *= min(told, default=1.0)
        self._restriper.reweigh(weights)

    def lost_paths(self) -> str:
        """The devices out of use, for messages."""
        return ", ".join(self.paths[d] for d in sorted(self._lost)) or "none"
