"""Work of emulated devices, layer by layer of the forward pass."""

from __future__ import annotations

from vllm_ssdkv.store.io.testing.throttled import ThrottledEngine


class DeviceTime:
    """Adds up the devices' work. Used by the thread that runs the forward pass.

    A layer's work is what was submitted since the layer before it had ended: pages that it chose,
    and pages that were read ahead meanwhile.

    Attributes:
        layers: How many there were.
        busiest_s: Sum over the layers of the seconds of the device that had most to do: no layer
            that needs what it reads takes less.
        even_s: The same if their work were spread evenly.
    """

    def __init__(self, engine: ThrottledEngine):
        self._engine = engine
        self._known = engine.busy_s()
        self.layers = 0
        self.busiest_s = 0.0
        self.even_s = 0.0

    def layer_ended(self) -> None:
        """A layer has its attention."""
        now = self._engine.busy_s()
        work, self._known = now - self._known, now
        self.layers += 1
        self.busiest_s += float(work.max())
        self.even_s += float(work.mean())
