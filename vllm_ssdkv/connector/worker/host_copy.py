"""A copy of a tensor to the host that is begun before anybody needs it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


class HostCopy:
    """Integers of a device on their way to the host, in the order of its current stream.

    What the stream does later neither waits for the copy nor changes it. On the CPU nothing is
    copied: the numbers are read where they lie.
    """

    def __init__(self, values: torch.Tensor):
        """Begin to copy ``values``, int32 of any shape. Does not wait."""
        self._event: Any = None
        self._values = values
        if values.is_cuda:
            cuda: Any = torch.cuda
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = cuda.Event()
            self._event.record(cuda.current_stream(values.device))

    def numpy(self) -> NDArray[np.int32]:
        """The integers; waits until they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._values.numpy()
