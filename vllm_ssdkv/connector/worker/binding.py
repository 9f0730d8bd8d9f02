"""Binding of a rank to the weights and adapters that the scheduler's keys name."""

from __future__ import annotations

import logging
from collections.abc import Callable

from vllm_ssdkv.base.sizes import approximate_size
from vllm_ssdkv.connector.identity.loaded_model import LoadedAdapters, LoadedModel
from vllm_ssdkv.connector.messages import Adapter, RankReport, StepPlan

logger = logging.getLogger(__name__)


class Binding:
    """Weights and adapters of this rank, and the changes of them that the scheduler was told of.

    Used by the worker's thread.
    """

    def __init__(self, model: LoadedModel, rank: int, tell: Callable[[bytes], None]):
        """
        Args:
            model: What this rank computes with.
            rank: This rank.
            tell: Tells the scheduler's process, before it starts, the model's digest.
        """
        self._model, self._rank, self._tell = model, rank, tell
        self._adapters = LoadedAdapters(model.roots)
        self._weights = b""
        self._changes = 0
        self._resets = 0
        """Resets of the cache after the last of which the weights were digested."""

    @property
    def routed(self) -> bool:
        """Check whether the model has experts, to which it sends single tokens."""
        return self._model.routed

    def start(self) -> None:
        """Digest the model and tell the scheduler's process.

        Raises:
            UnsupportedError: the model cannot be digested.
            StoreError: the scheduler's process cannot be told.
        """
        self._weights = self._digest()
        self._tell(self._weights)

    def _digest(self) -> bytes:
        found = self._model.digest()
        logger.info(
            "ssdkv: rank %d holds weights %s, %s read in %.2f s",
            self._rank,
            found.digest.hex()[:12],
            approximate_size(found.nbytes),
            found.seconds,
        )
        return found.digest

    def take_changes(self, report: RankReport) -> None:
        """Report the adapters that have changed since the last call."""
        report.adapters |= self._adapters.take_changes()

    def changed(self, plan: StepPlan, report: RankReport) -> bool:
        """Check whether the weights have changed since the last call, and report it.

        One look at the weights, and where they have changed, or the cache was reset, a pass over
        them. None where weights may be away, as in an engine that sleeps."""
        reset = plan.resets > self._resets
        looks = plan.compare or plan.loads or len(plan.commit.slots) or len(plan.save.slots)
        seen = plan.awake and bool(looks or self._model.touched()) and self._model.changed()
        digest = self._digest() if reset or seen else self._weights
        changed = digest != self._weights
        if changed:
            self._weights = report.weights = digest
            self._changes += 1
            report.changes = self._changes
            report.unseen = not seen
        if reset:
            self._resets = report.resets = plan.resets
        return changed

    def holds(self, plan: StepPlan) -> bool:
        """Check whether this rank has the weights and adapters that a plan's keys are bound to."""
        held = all(map(self.holds_adapter, plan.adapters.values()))
        return plan.changes[self._rank] == self._changes and held

    def holds_adapter(self, adapter: Adapter) -> bool:
        """Check whether this rank holds an adapter with these weights."""
        return self._adapters.changes(adapter.number) == adapter.changes[self._rank]
