"""An engine over devices whose faults can be switched, with answers that are known."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.e2e.models import prompts
from tests.e2e.workload import SMALL_DRAM, kv_tokens, page_mode, reuse_mode
from tests.faults import set_faults
from tests.kit.engine import Engine, Tokens

WINDOW, CHUNK, BLOCK = 128, 256, 32
PROMPTS = prompts((3000, 2100, 1000, 300, 1500), seed=21)
DEADLINE_S = 2.0
HANG_S = 300.0
"""A batch that takes longer has hung; without faults it takes seconds."""

AfterStep = Callable[[int], None]


def engine_options(
    mode: str,
    places: Sequence[Mapping[str, str]],
    control: Path,
    replicas: int = 1,
    **others: object,
) -> dict[str, object]:
    """Options of the connector: contexts come from the devices, faults from a control file.
    ``others`` are more of ``io``."""
    io = {"staging": "4MiB", "deadline": DEADLINE_S, "fault_file": str(control), **others}
    if mode == "page":
        return page_mode(places, window=WINDOW, io=io, replicas=replicas)
    return reuse_mode(places, dram=SMALL_DRAM, io=io, replicas=replicas)


@dataclass
class Bench:
    """One life of the engine; :meth:`restart` begins the next on the same devices."""

    model: Path
    places: list[dict[str, str]]
    control: Path
    wanted: list[tuple[int, ...]]
    mode: str = "page"
    prompts: list[Tokens] = field(default_factory=lambda: PROMPTS)
    io: Mapping[str, object] = field(default_factory=dict)
    replicas: int = 1
    turn: int = 0
    engine: Engine = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        paged = self.mode == "page"
        self.engine = Engine(
            self.model,
            ssdkv=engine_options(self.mode, self.places, self.control, self.replicas, **self.io),
            kv_tokens=2 * kv_tokens(WINDOW, CHUNK) if paged else 8192,
            max_num_batched_tokens=CHUNK,
            max_model_len=4096,
            enable_prefix_caching=paged,
        )

    def restart(self) -> None:
        """End the engine, unless it has ended, and start it again."""
        self.engine.close()
        self.start()

    @property
    def paths(self) -> list[str]:
        return [place["path"] for place in self.places]

    def faults(self, *rules: dict[str, Any]) -> None:
        """Have exactly these faults from now on."""
        set_faults(self.control, *rules)

    def ask(self, after_step: AfterStep | None = None) -> None:
        """All prompts; every request must end, in time, with the right tokens."""
        begin, self.turn = time.monotonic(), self.turn + 1
        names = [f"{self.turn}.{number}" for number in range(len(self.prompts))]
        for name, prompt in zip(names, self.prompts, strict=True):
            self.engine.add(name, prompt)
        got = self.engine.run(after_step)
        self.engine.settle()
        assert [got[name] for name in names] == self.wanted
        assert time.monotonic() - begin < HANG_S

    # ---- what can be seen ----

    @property
    def scheduler(self) -> Any:  # noqa: ANN401 - our scheduler's half, in this process
        return self.engine.scheduler.connector.scheduler

    def count(self, name: str, **labels: str) -> float:
        """A metric; 0 while a counter that names devices has not counted."""
        try:
            return self.engine.ssdkv(name, **labels)
        except KeyError:
            return 0.0

    def assert_clean(self) -> None:
        """Once idle: nothing is held that nobody uses."""
        self.engine.assert_nothing_held()

    # ---- damage ----

    def context(self, request: str) -> list[int]:
        """Slots of a running request's stored blocks."""
        for name, state in self.scheduler.requests.items():
            if name.startswith(request):
                return list(state.slots)
        return []

    def stored(self, prompt: int) -> list[int]:
        """Slots that hold the blocks of a prompt, once idle."""
        index, tokens = self.scheduler.index, self.prompts[prompt]
        self.engine.add("look", tokens, max_tokens=1)
        (request,) = self.engine.scheduler.waiting
        slots = index.lookup(self.scheduler.keys_of(request)).tolist()
        self.engine.abort("look")
        self.engine.settle()
        return slots

    def flip(self, slot: int, offset: int) -> None:
        """Change one bit of a slot on its device, past everything."""
        placement = self.scheduler.rebalancer.placement
        start = offset // 4096 * 4096
        extents = placement.extents(np.array([slot]), start, 4096)
        file = Path(self.paths[int(extents.device[0])]) / "rank0.data"
        flip_bit(file, int(extents.offset[0]) + offset - start)


def flip_bit(path: Path, offset: int, bit: int = 3) -> None:
    """Change one bit of a file."""
    with open(path, "r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))
        file.flush()
