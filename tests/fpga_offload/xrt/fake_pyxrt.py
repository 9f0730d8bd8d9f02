"""XRT's Python bindings as documented, over the bridge: for calls as the real ones take them.

As the real ones do, a run drops numbers that are none of 32 bits with a sign; here that is an
error.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from types import ModuleType
from typing import Any

from vllm_ssdkv.fpga_offload.description import KERNELS
from vllm_ssdkv.fpga_offload.xrt.runtime import Argument, CardBuffer, Runtime

LIMIT = 1 << 31
WORD = (1 << 32) - 1


class Direction(Enum):
    XCL_BO_SYNC_BO_TO_DEVICE = 0
    XCL_BO_SYNC_BO_FROM_DEVICE = 1


class State(IntEnum):
    ERT_CMD_STATE_COMPLETED = 4


class BufferKind(IntEnum):
    normal = 0
    p2p = 3


def fake(runtime: Runtime) -> ModuleType:
    """The module, on a card that is open."""
    module: Any = ModuleType("pyxrt")

    class Device:
        def __init__(self, index: int):
            if index > 15:
                raise RuntimeError(f"Could not open device with index '{index}'")

        def load_xclbin(self, path: str) -> str:
            return f"uuid of {path}"

        def get_info(self, what: str) -> str:
            assert what == "name"
            return runtime.name()

    class Kernel:
        shared = 1

        def __init__(self, card: Device, loaded: str, name: str, mode: int):
            assert isinstance(card, Device)
            assert loaded.startswith("uuid of ")
            assert mode == self.shared
            self.name = name

        def group_id(self, argument: int) -> tuple[str, int]:
            return self.name, argument

    class Buffer:
        normal, p2p = BufferKind.normal, BufferKind.p2p

        def __init__(self, card: Device, nbytes: int, kind: BufferKind, group: tuple[str, int]):
            assert isinstance(card, Device)
            peer = kind is BufferKind.p2p
            self.inner: CardBuffer = runtime.buffer(*group, nbytes, peer=peer)

        def map(self) -> memoryview:
            return memoryview(self.inner.mapped)

        def address(self) -> int:
            return self.inner.address

        def sync(self, way: Direction, nbytes: int, offset: int) -> None:
            assert offset == 0
            to_card = way is Direction.XCL_BO_SYNC_BO_TO_DEVICE
            runtime.sync(self.inner, nbytes, to_card=to_card)

    class Run:
        def __init__(self, kernel: Kernel):
            self.kernel = kernel
            self.given: dict[int, Argument] = {}

        def set_arg(self, place: int, value: object) -> None:
            if isinstance(value, Buffer):
                self.given[place] = value.inner
                return
            assert isinstance(value, int)
            assert -LIMIT <= value < LIMIT, "dropped silently"
            self.given[place] = value & WORD, 4

        def start(self) -> None:
            wanted = next(one for one in KERNELS if one.name == self.kernel.name)
            assert sorted(self.given) == list(range(len(wanted.arguments)))

        def wait(self, timeout_ms: int) -> State:
            given = [self.given[place] for place in sorted(self.given)]
            return State(runtime.run(self.kernel.name, given, timeout_ms / 1000))

    module.device, module.kernel, module.bo, module.run = Device, Kernel, Buffer, Run
    module.xclBOSyncDirection = Direction
    module.xrt_info_device = type("xrt_info_device", (), {"name": "name"})
    made: ModuleType = module
    return made
