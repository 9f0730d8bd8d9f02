"""A device attends to contexts near storage, with the real vLLM: the same tokens as without it.

Requests choose their selectors, as in ``test_mixed.py``: those that lose nothing have the tokens of
stock vLLM, the others those that they have without a device.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest

from tests.e2e.models import prompts
from tests.e2e.stock import Stock
from tests.e2e.test_mixed import ASKED, CHUNK, LOSSLESS, OPTIONS, PROMPTS, WINDOW, Mixed
from tests.e2e.workload import kv_tokens, page_mode
from tests.kit.engine import MAX_TOKENS, Engine
from tests.store.unhurried import open_unhurried_engines
from vllm_ssdkv.config.offload import OffloadFault
from vllm_ssdkv.offload.host import HostDevice
from vllm_ssdkv.offload.offloader import Offloader
from vllm_ssdkv.offload.testing.drive_timing import DRIVES
from vllm_ssdkv.offload.testing.faulty import FaultyDevice
from vllm_ssdkv.offload.testing.flash import BLOCK_BYTES
from vllm_ssdkv.offload.testing.throttled_drives import ThrottledDrives

NAMES = ["sparf", "adaptive", "swarm", "window", "exact", "eighth", "tokens", "clusters"]


class Near(Mixed):
    """A bench whose contexts are attended to by the host's device."""

    def start(self) -> None:
        io = {"staging": "4MiB", "deadline": 2.0, "fault_file": str(self.control)}
        options = {**OPTIONS, "offload": {"kind": "host", "threads": 1, "share": 1.0}}
        self.engine = Engine(
            self.model,
            ssdkv=page_mode(self.places, window=WINDOW, dram="40MiB", io=io, **options),
            kv_tokens=3 * kv_tokens(WINDOW, CHUNK),
            max_num_seqs=len(ASKED),
            max_num_batched_tokens=CHUNK,
            max_model_len=2048,
        )

    @contextmanager
    def device(self, made: Offloader | None) -> Iterator[None]:
        """Have another one for a while, or none."""
        own, self.worker.page_mode.offloader = self.worker.page_mode.offloader, made
        try:
            yield
        finally:
            self.worker.page_mode.offloader = own
            if made is not None:
                assert made.close(10.0)


@pytest.fixture(scope="module")
def near(
    models: dict[str, Path],
    stock: Stock,
    devices: Callable[..., list[dict[str, str]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Near]:
    answers = stock.answers("llama", [PROMPTS[name] for name in LOSSLESS])
    wanted = {name: answer.tokens for name, answer in zip(LOSSLESS, answers, strict=True)}

    with pytest.MonkeyPatch.context() as patch:
        open_unhurried_engines(patch)
        control = tmp_path_factory.mktemp("faults") / "faults.json"
        made = Near(models["llama"], devices(4), control, [], wanted_of=wanted)
        yield made
        made.faults()
        made.engine.close()


@pytest.fixture(scope="module")
def wanted(near: Near) -> dict[str, tuple[int, ...]]:
    """Tokens of each request without a device, of which the prompts are stored already."""
    near.run(NAMES)
    with near.device(None):
        before = near.count("offload_tickets")
        found = near.run(NAMES)
        assert near.count("offload_tickets") == before
    return found


def test_same_tokens_as_without(near: Near, wanted: dict[str, tuple[int, ...]]) -> None:
    assert near.count("offload_in_use") == 1
    before = near.count("offload_tickets")
    assert near.run(NAMES) == wanted
    assert near.count("offload_tickets") > before
    assert near.count("offload_steps", by="device") > 0
    for payload in ("query", "selection", "partials", "kv"):
        assert near.count("offload_bytes", payload=payload) > 0, payload
    assert near.worker.counters.total("offload_seconds", part="attend") > 0
    near.assert_clean()


@pytest.mark.parametrize("share", [0.0, 0.5, "auto"])
def test_no_share_changes_a_token(
    near: Near, wanted: dict[str, tuple[int, ...]], share: float | Literal["auto"]
) -> None:
    """Of contexts in DRAM and on drives, and of chosen pages."""
    before = near.count("offload_tickets")
    both = near.count("offload_steps", by="both")
    with near.device(Offloader(HostDevice(1), 30.0, near.worker.counters, share)):
        assert near.run(NAMES) == wanted
    assert (near.count("offload_tickets") > before) == (share != 0.0)
    assert (near.count("offload_steps", by="both") > both) == (share != 0.0)
    near.assert_clean()


def test_drives_of_a_paper_with_their_flash(near: Near, wanted: dict[str, tuple[int, ...]]) -> None:
    """The same tokens; and slots that are written anew wait to be erased, half on each drive."""
    device = ThrottledDrives(HostDevice(1), DRIVES["instinfer"], 2, slot_bytes=BLOCK_BYTES)
    with near.device(Offloader(device, 30.0, near.worker.counters)):
        assert near.run(NAMES) == wanted
        before = [erasure.stale + erasure.erased for erasure in device.erasures]
        near.texts, near.asked = {"new": prompts((512,), 4711)[0]}, {"new": {"selector": "exact"}}
        try:
            near.run(["new"])
            near.engine.settle()
        finally:
            near.texts, near.asked = PROMPTS, ASKED
    after = [erasure.stale + erasure.erased for erasure in device.erasures]
    blocks = 512 // near.engine.block
    assert [now - then for now, then in zip(after, before, strict=True)] >= [blocks / 2] * 2
    near.assert_clean()


def test_bytes_over_the_link(near: Near) -> None:
    """Of one exact request, n (2 Hq d + Hq (4 d + 8)) per token and layer, with one device, and
    twice as much for queries, which have 32 bits here. Its KV is stored already."""
    text = prompts((1024,), 77)[0]
    tokens = 4 * 32 + 1
    payloads = ("query", "partials", "selection", "kv")
    near.texts, near.asked = {"one": text}, {"one": {"selector": "exact"}}
    near.max_tokens = tokens
    try:
        near.run(["one"])
        near.engine.settle()
        before = {payload: near.count("offload_bytes", payload=payload) for payload in payloads}
        near.run(["one"])
    finally:
        near.texts, near.asked, near.max_tokens = PROMPTS, ASKED, MAX_TOKENS
    gained = {p: near.count("offload_bytes", payload=p) - before[p] for p in payloads}
    shape = json.loads((near.model / "config.json").read_text())
    heads, layers = shape["num_attention_heads"], shape["num_hidden_layers"]
    head_size = shape.get("head_dim") or shape["hidden_size"] // heads
    rows = (tokens - 1) * layers  # the first token is the prompt's
    assert gained["query"] == rows * 4 * heads * head_size
    assert gained["partials"] == rows * heads * (4 * head_size + 8)
    assert gained["selection"] == 0


def test_given_up_while_tokens_are_decoded(near: Near, wanted: dict[str, tuple[int, ...]]) -> None:
    gone = ["sparf", "exact", "eighth"]

    def give_up() -> None:
        near.engine.abort(*(f"{near.turn}.{name}" for name in gone))

    near.run(NAMES, after_step=near.once_decoding(give_up), given_up=gone)
    near.assert_clean()
    assert near.run(gone) == {name: wanted[name] for name in gone}


def test_preempted_while_tokens_are_decoded(near: Near) -> None:
    before = near.engine.metric("vllm:num_preemptions")

    def preempt() -> None:
        assert near.engine.llm.llm_engine.reset_prefix_cache(reset_running_requests=True)

    near.run(NAMES, after_step=near.once_decoding(preempt))
    assert near.engine.metric("vllm:num_preemptions") > before
    near.assert_clean()


@pytest.mark.parametrize(
    ("kind", "cause"), [("error", "error"), ("rows", "answer"), ("stall", "deadline")]
)
@pytest.mark.parametrize("after", [0, 21])
def test_a_device_that_fails_changes_no_token(
    near: Near,
    wanted: dict[str, tuple[int, ...]],
    kind: Literal["error", "rows", "stall"],
    cause: str,
    after: int,
) -> None:
    before = near.count("offload_failures", cause=cause)
    recomputed = near.count("recomputed_requests")
    fault = OffloadFault(kind=kind, after=after)
    deadline_s = 0.2 if kind == "stall" else 30.0
    made = Offloader(FaultyDevice(HostDevice(1), fault), deadline_s, near.worker.counters)
    with near.device(made):
        assert near.run(NAMES) == wanted
        assert not made.in_use
    assert near.count("offload_failures", cause=cause) > before
    assert near.count("recomputed_requests") == recomputed
    near.assert_clean()


# The order matters: a device that is given up stays so.
@pytest.mark.parametrize(("device", "kind"), [(2, "eio"), (3, "stall")])
def test_a_drive_fails_while_tokens_are_decoded(near: Near, device: int, kind: str) -> None:
    before = near.count("recomputed_requests")
    rule = {"kind": kind, "device": device, "seconds": 30.0 if kind == "stall" else 0.0}
    near.run(NAMES, after_step=near.once_decoding(lambda: near.faults(rule)))
    assert near.count("device_lost", device=near.paths[device]) == 1
    assert near.count("recomputed_requests") > before
    near.faults()
    near.run(NAMES)
    assert near.worker.page_mode.offloader.in_use
    near.assert_clean()
