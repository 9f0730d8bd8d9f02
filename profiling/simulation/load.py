"""Time of a load of stored blocks, by whose software and from which drives or node."""

from __future__ import annotations

from typing import Final

from vllm_ssdkv.profiling.simulation.hardware import IoPath, Machine, find, node_costs
from vllm_ssdkv.profiling.simulation.storage import Storage

READ_BYTES: Final = 512 * 1024
"""Size of one request: a stripe unit."""


def load_s(
    machine: Machine,
    storage: Storage,
    nbytes: float,
    block_bytes: float,
    *,
    path: str | None = None,
    node: str | None = None,
) -> float:
    """Seconds in which whole blocks come from the drives into the GPU, with nothing else on them.

    Args:
        machine: Its links.
        storage: The drives.
        nbytes: Of all blocks.
        block_bytes: Of one of them.
        path: Name of the software that reads. None: ours, with enough in flight.
        node: Kind of socket to a node that has the store, "unix" or "tcp". None: it is the engine's
            own.

    Raises:
        ConfigError: no such path or socket.
    """
    blocks = -int(-nbytes // block_bytes)
    node_s = 0.0 if node is None else node_costs(node).load_s(blocks, nbytes)
    drives = max(
        device.read_s(share * nbytes, -int(-share * nbytes // READ_BYTES))
        for device, share in zip(storage.devices, storage.shares, strict=True)
    )
    drives = max(drives, nbytes / machine.drives_link)
    latency = max(device.latency_s for device in storage.devices)
    to_gpu = nbytes / machine.gpu_link
    if path is None:
        return node_s + latency + max(drives, to_gpu)
    software = find(IoPath, path)
    drives = max(drives, blocks * (software.request_s or 0.0))
    if software.in_flight is not None:
        # A block lies on all drives, or on one: a file system's stripe.
        one = latency + block_bytes / sum(device.rate for device in storage.devices)
        drives = max(drives, blocks * one / software.in_flight)
    moved = drives + to_gpu if software.relayed else max(drives, to_gpu)
    return node_s + latency + moved
