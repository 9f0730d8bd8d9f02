"""Tables of a step on a device, at fixed addresses, and what is lent to the steps it works on.

Kernels find rows, frames and records in the tables (``kernels/operands/step_tables.py``). The host
knows what they hold, and sends what a step changes: one copy, which it does not wait for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.kernels.operands.step_tables import FIELDS, StepTables, TableRow

STEPS: Final = 2
"""Steps that a device may have before it at a time. A third one waits for the first."""


class Event(Protocol):
    """Mark in the work of a device: ``torch.cuda.Event``, or another."""

    def record(self) -> None:
        """Set it behind the work that the device has been given so far."""

    def query(self) -> bool:
        """Check whether the device has come by it."""

    def synchronize(self) -> None:
        """Wait until it has."""


class Leases:
    """Memory that steps use until the device has done them: frames, records, staged changes.

    Used by the thread of the forward pass.
    """

    def __init__(self, new_event: Callable[[], Event]) -> None:
        self._new = new_event
        self._held: deque[tuple[Event, Callable[[], None]]] = deque()

    def __len__(self) -> int:
        """Steps whose leases have not ended."""
        return len(self._held)

    def end_step(self, give_back: Callable[[], None]) -> None:
        """Have this called once the device has done what it has been given so far; at once where
        nothing can be told of that, since the device has failed."""
        try:
            event = self._new()
            event.record()
        except BaseException:
            give_back()
            raise
        self._held.append((event, give_back))

    def settle(self) -> None:
        """End the leases of steps that are done; wait for the oldest if there is no room."""
        while self._held:
            event, give_back = self._held[0]
            if len(self._held) >= STEPS:
                event.synchronize()
            elif not event.query():
                return
            self._held.popleft()
            give_back()

    def close(self) -> None:
        """Wait for all steps, and end their leases."""
        while self._held:
            event, give_back = self._held.popleft()
            event.synchronize()
            give_back()


class DeviceTables:
    """Tables of the rows of a step. Used by the thread of the forward pass."""

    def __init__(self, shape: StepTables, device: torch.device) -> None:
        """Take the memory: twice that of the tables on the device, and as much pinned."""
        self.shape = shape
        self.memory = torch.zeros(shape.size, dtype=torch.int64, device=device)
        self._known: NDArray[np.int64] = np.zeros(shape.size, dtype=np.int64)
        self._written = np.arange(shape.hbm_blocks, dtype=np.int64)
        pinned = device.type == "cuda"
        staged = STEPS, shape.size, 2
        self._staging = torch.zeros(staged, dtype=torch.int64, pin_memory=pinned)
        self._changes = torch.zeros(staged[1:], dtype=torch.int64, device=device)
        self._turn = 0

    def update(
        self,
        rows: Mapping[int, TableRow],
        service: tuple[int, int] = (0, 0),
        identities: Sequence[NDArray[np.int64]] = (),
    ) -> torch.Tensor:
        """Send what differs for a step with these rows, by the HBM block that each one's token is
        written to. Of two steps, the device must have done the one before the last.

        Args:
            rows: See above.
            service: As in ``triton_kernels/misses.py``.
            identities: Of each row what its blocks hold, if the tables say it.

        Returns:
            The changes on the device: int64 [n, 2], place and value.
        """
        shape = self.shape
        blocks = np.fromiter(rows, dtype=np.int64, count=len(rows))
        touched = np.union1d(self._written, blocks)
        numbers = np.full(shape.hbm_blocks, -1, dtype=np.int64)
        numbers[blocks] = np.arange(len(blocks))
        found = [self._differing(touched, numbers[touched])]
        self._written = blocks
        answers = shape.service + np.arange(len(service))
        found.append(self._differing(answers, np.array(service, dtype=np.int64)))
        for number, row in enumerate(rows.values()):
            values = len(row.frames), row.first_block, len(row.records), row.least, row.most
            fields = shape.fields + number + np.arange(len(FIELDS)) * shape.rows
            found.append(self._differing(fields, np.array(values, dtype=np.int64)))
            for begin, addresses in ((shape.frames, row.frames), (shape.records, row.records)):
                places = begin + number * shape.blocks + np.arange(len(addresses))
                found.append(self._differing(places, addresses.view(np.int64)))
        for number, held in enumerate(identities):
            places = shape.identities + number * shape.blocks + np.arange(len(held))
            found.append(self._differing(places, held))
        every = np.concatenate(found)
        count = len(every)
        staged, self._turn = self._staging[self._turn, :count], (self._turn + 1) % STEPS
        staged.numpy()[:] = every
        changes = self._changes[:count]
        changes.copy_(staged, non_blocking=True)
        return changes

    def _differing(self, places: NDArray[np.int64], values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Places whose value changes, and the values, [n, 2]."""
        changed = np.flatnonzero(self._known[places] != values)
        self._known[places[changed]] = values[changed]
        return np.stack([places[changed], values[changed]], axis=1)
