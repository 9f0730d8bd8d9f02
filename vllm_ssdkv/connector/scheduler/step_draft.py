"""The next plan, as far as it is known before vLLM has scheduled its step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.connector.messages import ContextDelta, CopyFrames, CopyToDram, Flush, Load
from vllm_ssdkv.connector.metadata import SSDKVMetadata


@dataclass(slots=True)
class StepDraft:
    """Orders that wait for the next plan. Used by the scheduler's thread.

    The fields are those of :class:`StepPlan`, but for four:

    Attributes:
        copies: (slot, epoch, HBM block, its index in its context or -1) to copy to DRAM.
        flushes: (slot, epoch, key) to write to the devices.
        frame_copies: (old slot, its epoch, new slot, its epoch, key), to copy in DRAM and write.
        shape: (tokens before, tokens) of each row of the step.
    """

    loads: list[Load] = field(default_factory=list)
    contexts: list[ContextDelta] = field(default_factory=list)
    forget: list[str] = field(default_factory=list)
    discard: list[int] = field(default_factory=list)
    invalid: list[int] = field(default_factory=list)
    believed: list[tuple[int, int]] = field(default_factory=list)
    trim: NDArray[np.int64] | None = None
    copies: list[tuple[int, int, int, int]] = field(default_factory=list)
    flushes: list[tuple[int, int, bytes]] = field(default_factory=list)
    frame_copies: list[tuple[int, int, int, int, bytes]] = field(default_factory=list)
    shape: list[tuple[int, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Check whether workers must hear of something though no request runs."""
        return bool(self.discard or self.forget or self.believed)

    def move_into(self, plan: SSDKVMetadata) -> None:
        """Hand everything over to ``plan``; the draft is empty then."""
        plan.save, self.copies = CopyToDram.of(self.copies), []
        plan.commit, self.flushes = Flush.of(self.flushes), []
        if self.frame_copies:
            plan.copy_frames, self.frame_copies = CopyFrames.of(self.frame_copies), []
        plan.loads, self.loads = self.loads, []
        plan.contexts, self.contexts = self.contexts, []
        plan.forget, self.forget = self.forget, []
        plan.discard, self.discard = self.discard, []
        plan.invalid, self.invalid = self.invalid, []
        plan.believed, self.believed = self.believed, []
        plan.trim, self.trim = self.trim, None
        self.shape = []
