"""Requests that choose where HBM is small, priorities differ and drives fail, with two copies.

The KV cache holds fewer blocks than the requests' windows, so that vLLM preempts; K's channels are
on the devices like everything else. Where nothing is computed again, answers are those of an
undisturbed run whatever the budget; where something is, up to there, and in full for those
requests that lose nothing (docs/internals/page-mode.md, "Computed again").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from tests.e2e.models import make_llama, prompts
from tests.e2e.stock import Stock
from tests.e2e.test_mixed import Mixed
from tests.e2e.workload import page_mode
from tests.kit.engine import Engine
from tests.store.unhurried import open_unhurried_engines
from vllm_ssdkv.base.metrics import counter_key

WINDOW, CHUNK = 256, 512
BLOCK = 256
"""The least for a channel page of 4 of a head's 32 channels."""
HBM_BLOCKS = 13
"""Room for the prompts of nine requests: none is left where their next blocks begin."""
LENGTH = 110
SHORT = 30
"""Tokens that are enough for a drive to fail among them."""

EARLY: dict[str, dict[str, object]] = {
    "a lossless": {"budget": 1},
    "a token budget": {"budget_tokens": 300},
    "a exact": {"selector": "exact"},
    "a share": {"budget": 0.75},
}
"""They come first, and have to go first."""
LATE: dict[str, dict[str, object]] = {
    "b adaptive": {"selector": "adaptive", "budget": 1},
    "b window": {"selector": "window", "budget": 1},
    "b swarm": {"selector": "swarm", "budget": 1},
    "b exact": {"selector": "exact"},
    "b share": {"budget": 0.75},
}
LONG: dict[str, dict[str, object] | None] = {
    "c lossless": {"budget": 1},
    "c eighth": None,
    "c adaptive": {"selector": "adaptive", "budget": 0.25},
    "c swarm": {"selector": "swarm", "budget": 0.25},
    "c exact": {"selector": "exact"},
}
ASKED = {**EARLY, **LATE, **LONG}
LENGTHS = (440, 457, 433, 448, 250, 226, 232, 244, 238, 3000, 2600, 2200, 1800, 1400)
PROMPTS = dict(zip(ASKED, prompts(LENGTHS, 37), strict=True))
LOSSLESS = [
    n for n in ASKED if not n.endswith(("budget", "share", "eighth", "adaptive", "c swarm"))
]
URGENCY = {name: -number for number, name in enumerate(ASKED)}
"""The later, the more urgent: vLLM takes back what it has scheduled already in the same step."""
LOSSY = [name for name in (*EARLY, *LATE) if name not in LOSSLESS]


@dataclass
class Pressed(Mixed):
    """A mixed bench with two copies of everything and little HBM."""

    def start(self) -> None:
        io = {"staging": "4MiB", "deadline": 2.0, "fault_file": str(self.control)}
        sparse = {
            "budget": 0.125,
            "mass": 0.9,
            "exact_below": 0,
            "channel_pages": "ssd",
            "page_cache": "16MiB",
            "summaries": "2MiB",
            "token_order": "keys",
        }
        self.engine = Engine(
            self.model,
            ssdkv=page_mode(
                self.places,
                window=WINDOW,
                dram="30MiB",
                io=io,
                replicas=2,
                selector="sparf",
                sparse=sparse,
            ),
            kv_tokens=HBM_BLOCKS * BLOCK,
            block_size=BLOCK,
            max_num_batched_tokens=CHUNK,
            max_model_len=4096,
            scheduling_policy="priority",
        )

    def preemptions(self) -> float:
        return self.engine.metric("vllm:num_preemptions")


@pytest.fixture(scope="module")
def pressed(
    devices: Callable[..., list[dict[str, str]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pressed]:
    model = make_llama(tmp_path_factory.mktemp("model"), head_dim=32, hidden=128, layers=3)
    stock = Stock({"llama": model})
    answers = stock.answers("llama", [PROMPTS[name] for name in LOSSLESS], LENGTH)
    wanted = {name: answer.tokens for name, answer in zip(LOSSLESS, answers, strict=True)}

    with pytest.MonkeyPatch.context() as patch:
        open_unhurried_engines(patch)
        control = tmp_path_factory.mktemp("faults") / "faults.json"
        made = Pressed(
            model,
            devices(4),
            control,
            [],
            wanted_of=wanted,
            asked=ASKED,
            texts=PROMPTS,
            priorities=URGENCY,
            max_tokens=LENGTH,
        )
        yield made
        made.faults()
        made.engine.close()


def test_hbm_runs_full_and_the_least_urgent_go(pressed: Pressed) -> None:
    """Those that came first; what they had decoded by then is what they decode undisturbed."""
    undisturbed: dict[str, int] = {}
    preempted: set[str] = set()

    def note(step: int) -> None:
        for name in (*EARLY, *LATE):
            for request in pressed.engine.scheduler.requests.values():
                if request.request_id.startswith(f"{pressed.turn}.{name}"):
                    if request.num_preemptions:
                        preempted.add(name)
                    else:
                        undisturbed[name] = request.num_output_tokens
        if step == 4:
            for name in LATE:
                pressed.add(name)

    pressed.turn += 1
    for name in EARLY:
        pressed.add(name)
    found = pressed.engine.run(note)
    pressed.engine.settle()
    got = {name: found[f"{pressed.turn}.{name}"] for name in (*EARLY, *LATE)}
    assert pressed.preemptions() > 0
    assert preempted
    assert preempted <= set(EARLY)
    assert pressed.count("hit_tokens") > 0
    assert pressed.count("sparse_selections") > 0
    for name in LOSSLESS:
        assert got.get(name, pressed.wanted_of[name]) == pressed.wanted_of[name], name
    pressed.assert_clean()

    before = pressed.preemptions()
    alone = pressed.run(LOSSY)
    assert pressed.preemptions() == before
    for name, tokens in alone.items():
        same = undisturbed[name] if name in preempted else LENGTH
        assert got[name][:same] == tokens[:same], name
    assert pressed.count("recomputed_requests") == 0


def test_a_drive_that_hangs_costs_one_deadline_and_no_token(pressed: Pressed) -> None:
    """Whatever was asked of it: what streams, chosen pages, channels, pages read ahead."""
    pressed.max_tokens = SHORT
    calm = pressed.run(list(LONG))
    assert len({*calm.values()}) == len(LONG)
    channels = counter_key("sparse_bytes_fetched", pages="channel", tier="ssd")
    read = pressed.count("sparse_bytes_fetched", pages="channel", tier="ssd")
    assert read > 0
    rule = {"kind": "stall", "device": 3, "seconds": 60.0}
    struck: list[float] = []

    def strike() -> None:
        # What vLLM was told last may be older.
        struck.append(pressed.worker.counters.totals()[channels])
        # So few tokens choose what the ones before them chose.
        store = pressed.worker.store
        store._pages.forget(np.arange(pressed.scheduler.index.num_slots))
        pressed.faults(rule)

    assert pressed.run(list(LONG), pressed.once_decoding(strike)) == calm
    assert pressed.count("sparse_bytes_fetched", pages="channel", tier="ssd") > struck[0] > read
    assert pressed.count("device_lost", device=pressed.paths[3]) == 1
    assert pressed.count("io_deadline_exceeded") == 1
    for name in ("recomputed_requests", "slots_dropped", "checksum_failures", "load_failures"):
        assert pressed.count(name) == 0, name
    pressed.faults()
    pressed.assert_clean()


def test_a_drive_that_fails_with_its_partner(pressed: Pressed) -> None:
    """No copy is left of what both held: those requests are computed again."""
    pressed.max_tokens = SHORT
    both = [{"kind": "eio", "device": device} for device in (2, 3)]
    pressed.run(list(LONG), pressed.once_decoding(lambda: pressed.faults(*both)))
    assert pressed.count("device_lost", device=pressed.paths[2]) == 1
    assert pressed.count("recomputed_requests") > 0
    pressed.faults()
    pressed.run(list(LONG))
    pressed.assert_clean()
