"""A decoder whose whole step is one graph, which is replayed for the tokens after its capture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.triton_kernels.recorded import Recorded
from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.config.request import RequestOptions
from vllm_ssdkv.config.selectors import SelectorName
from vllm_ssdkv.connector.graphs import piecewise_reason
from vllm_ssdkv.connector.worker import paged_step, selector_registry
from vllm_ssdkv.kernels.scoring import TritonScoringKernels
from vllm_ssdkv.profiling.decode_harness import decoder, forward
from vllm_ssdkv.profiling.decode_harness.decoder import PagedDecoder, Room
from vllm_ssdkv.profiling.decode_harness.models import make_model, small_config
from vllm_ssdkv.profiling.decode_harness.part_clock import AttentionTimer
from vllm_ssdkv.profiling.decode_harness.tokens import config_of
from vllm_ssdkv.store.read.miss_answers import MissAnswers

CPU = torch.device("cpu")
ROOM = Room(requests=2, longest=160, chunk=64)
PROMPTS = 95, 40
STEPS = 5
PIECES = 3
"""Graphs of a step that is timed: one more than layers."""
CHOICES = (
    *("sparse_selections", "sparse_pages_selected", "sparse_pages_in_context"),
    "sparse_selections_short",
)
READ = "pages of drives"
SCORED = {name: ["_rotate", "_logits"] for name in ("codes", "adaptive")} | {"bounds": ["_pages"]}
"""Kernels that score pages."""


class Passed:
    """An event of a device that has done everything."""

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def model_of(layers: int) -> Any:  # noqa: ANN401 - transformers' model
    return make_model(small_config("llama", layers=layers, head_size=16), CPU, torch.float32)


def capture(patch: pytest.MonkeyPatch, graph: Callable[[], Recorded] = Recorded) -> None:
    """Have decoders capture their steps as these graphs."""
    patch.setattr(forward, "graphs_of", lambda _: graph)
    patch.setattr(decoder, "events_of", lambda _: Passed)


@pytest.fixture
def model() -> Any:  # noqa: ANN401 - transformers' model
    return model_of(layers=2)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    capture(monkeypatch)


def with_places(config: SSDKVConfig) -> SSDKVConfig:
    """Options with places on the device for pages that are chosen again."""
    sparse = config.sparse.model_copy(update={"hbm_pages": MIB})
    return config.model_copy(update={"sparse": sparse})


def forget_frames(one: PagedDecoder) -> None:
    """Have the first blocks of a request on the drive alone."""
    assert one.drain(30)
    one.leave_frames(["a"], blocks=2)


def decoded(
    model: Any,  # noqa: ANN401 - transformers' model
    selector: SelectorName,
    store: Path,
    launches: str,
    steps: int = STEPS,
    *,
    hot: bool = False,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Logits of steps behind two prompts, with tokens that do not depend on them, and what rows
    chose in them. The last step is timed, and thus never one graph. Where rows choose, one lacks
    frames of its first blocks. ``hot``: the device has places for pages that are chosen again.
    """
    draw = torch.Generator().manual_seed(1)
    found = []
    chooses = selector != "exact"
    config = config_of(selector, budget=0.85)
    if hot:
        config = with_places(config)
    with PagedDecoder(model, config, ROOM, store, durable=chooses) as one:
        for name, count in zip("ab", PROMPTS, strict=True):
            one.prefill(name, torch.randint(0, 256, (count,), generator=draw).tolist())
        if chooses:
            forget_frames(one)
        for _ in range(steps):
            ids = torch.randint(0, 256, (2,), generator=draw)
            found.append(one.step(["a", "b"], ids).clone())
            assert one.passes.launches == launches
        one.timer = AttentionTimer(CPU)
        found.append(one.step(["a", "b"], ids).clone())
        counters = one.worker.counters
    chosen = {name: counters.total(name) for name in CHOICES}
    read = counters.total("sparse_pages_fetched", tier="ssd")
    return torch.stack(found), chosen | {READ: read}


@pytest.mark.parametrize(
    "selector",
    ["exact", "window", "bounds", "adaptive", pytest.param("codes", marks=pytest.mark.soak)],
)
def test_one_graph_decodes_all_steps(
    selector: SelectorName,
    model: Any,  # noqa: ANN401 - transformers' model
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks leave HBM between the steps, and rows are in other places of the batch's tables.

    Native code looks logits of codes up in rounded tables, so pages that are nearly alike change
    places: the host chooses by the same kernels there.
    """
    by_codes = selector in ("codes", "adaptive")
    steps = 2 if by_codes else STEPS  # the interpreter takes long for them
    with monkeypatch.context() as host:
        if by_codes:
            host.setattr(selector_registry, "select_scoring_kernels", TritonScoringKernels)
            host.setattr(paged_step.DecodePlan, "of", lambda *_: None)
        want, chosen = decoded(model, selector, tmp_path / "native", "one by one", steps)
    graphs: list[Recorded] = []

    def new() -> Recorded:
        graphs.append(Recorded())
        return graphs[-1]

    capture(monkeypatch, new)
    launches = "one CUDA graph a step"
    hot = selector == "bounds"
    got, counted = decoded(model, selector, tmp_path / "captured", launches, steps, hot=hot)
    assert len(graphs) == 1 + PIECES
    asks = ["_wait"] if selector != "exact" else []
    brings = ["_find", *asks, "_fill"] if hot else asks
    layer = ["_store", "_attend", *SCORED.get(selector, []), "_resolve", *brings, "_attend"]
    names = [f"{name}_kernel" for name in ["_match", *[*layer, "_merge"] * 2]]
    assert graphs[0].launches == names
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert counted == chosen
    assert chosen["sparse_selections_short"] == 0 or selector == "adaptive"
    assert all(chosen[name] for name in CHOICES[:3]) == (selector != "exact")
    # The first blocks have the sinks, which all choose.
    assert (chosen[READ] > 0) == (selector != "exact")


def test_where_a_capture_fails_the_host_chooses_and_counts(
    model: Any,  # noqa: ANN401 - transformers' model
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Refused(Recorded):
        def capture_begin(self) -> None:
            raise RuntimeError("operation not permitted")

    want, chosen = decoded(model, "bounds", tmp_path / "native", "one by one")
    capture(monkeypatch, Refused)
    launches = "one by one: operation not permitted"
    got, counted = decoded(model, "bounds", tmp_path / "refused", launches)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert counted == chosen


@pytest.mark.usefixtures("captured")
def test_places_for_too_few_pages_are_refused(tmp_path: Path) -> None:
    config = with_places(config_of("bounds"))
    with pytest.raises(ConfigError, match="hbm_pages has room for 256 pages"):
        PagedDecoder(model_of(layers=20), config, ROOM, tmp_path, durable=False)


@pytest.mark.usefixtures("captured")
def test_a_row_that_attends_to_all_of_its_pages_may_lack_more_than_others_choose(
    model: Any,  # noqa: ANN401 - transformers' model
    tmp_path: Path,
) -> None:
    with PagedDecoder(model, config_of("window", budget=0.2), ROOM, tmp_path) as one:
        one.start("a", PROMPTS[0], RequestOptions(selector="exact"))
        one.start("b", 60)
        for name, count in (("a", PROMPTS[0]), ("b", 60)):
            one.prefill(name, [1] * count)
        forget_frames(one)
        for _ in range(2):
            one.step(["a", "b"], torch.tensor([1, 1]))
        assert one.passes.launches == "one CUDA graph a step"
        counters, tiers = one.worker.counters, ("dram", "page_cache", "ssd")
        found = [counters.total("sparse_pages_fetched", tier=tier) for tier in tiers]
        lacked = 2 * one.layout.geometry.pages_per_layer * 2
        assert found[1:] == [0, lacked]
        assert found[0] > 0


@pytest.mark.usefixtures("captured")
def test_steps_are_served_whose_rows_tables_describe(
    model: Any,  # noqa: ANN401 - transformers' model
    tmp_path: Path,
) -> None:
    """Kernels know no sinks, and no window that is longer than they have room for."""
    with PagedDecoder(model, config_of("exact"), ROOM, tmp_path, durable=False) as one:
        paged = one.worker.page_mode
        assert piecewise_reason(paged.config, paged.layout, paged.layers) == ""
        odd = replace(paged.layers, plain=False)
        assert "sinks" in piecewise_reason(paged.config, paged.layout, odd)
        assert paged.device is not None
        one.window = ROOM.longest  # and more than the options say
        for name, tokens in (("short", PROMPTS[1]), ("long", ROOM.longest - 1)):
            one.prefill(name, [1] * tokens)
            one.step([name], torch.tensor([1]))
            assert paged.device.serves == (name == "short")


@pytest.mark.usefixtures("captured")
def test_the_host_attends_where_a_layer_cannot_get_all_that_it_may_lack(
    model: Any,  # noqa: ANN401 - transformers' model
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room = replace(ROOM, requests=1)
    with PagedDecoder(model, config_of("window", budget=0.85), room, tmp_path) as one:
        device = one.worker.page_mode.device
        assert device is not None
        one.prefill("a", [1] * PROMPTS[0])
        forget_frames(one)
        monkeypatch.setattr(MissAnswers, "room", 1)
        one.step(["a"], torch.tensor([1]))
        assert device.armed
        assert not device.answered
        assert one.passes.launches == "CUDA graphs"
