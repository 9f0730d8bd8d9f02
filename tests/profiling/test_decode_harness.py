"""The decoder without vLLM: its tokens, its selectors against the oracles, and its stage."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import vllm_ssdkv
from tests.oracles.sparse_attention import (
    attend_chosen,
    bound_logits,
    choose,
    page_bounds,
    page_weights,
    sparq_attention,
)
from vllm_ssdkv.base.metrics import counter_key
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.config.request import RequestOptions
from vllm_ssdkv.config.selectors import SelectorName
from vllm_ssdkv.connector.kv_layout import paged_geometry
from vllm_ssdkv.connector.worker import device_memory, page_mode
from vllm_ssdkv.connector.worker import worker as worker_module
from vllm_ssdkv.profiling.decode_harness import stage
from vllm_ssdkv.profiling.decode_harness.attention import attention_by
from vllm_ssdkv.profiling.decode_harness.cells import (
    BY_BOUNDS,
    BY_CHANNELS,
    BY_CODES,
    EXACT,
    SPARE_FRAMES,
    Case,
    Group,
    Scale,
    groups,
    options,
)
from vllm_ssdkv.profiling.decode_harness.decoder import PagedDecoder, Room
from vllm_ssdkv.profiling.decode_harness.models import head_size, kv_heads, make_model, small_config
from vllm_ssdkv.profiling.decode_harness.tokens import (
    CHOOSING,
    COUNT,
    FAMILIES,
    ON_DRIVE,
    ROOM,
    check_drive,
    check_exact,
    config_of,
    own_tokens,
    paged_logits,
    prompts,
)
from vllm_ssdkv.profiling.gpu_pack.results import (
    NO_TIME,
    REPORT,
    RESULTS,
    ResultLog,
    Row,
    read_rows,
)
from vllm_ssdkv.profiling.gpu_pack.stage import StageRun
from vllm_ssdkv.store.memory.memory_plan import MemoryPlan
from vllm_ssdkv.store.open import sparse_memory

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
PACKAGE = Path(vllm_ssdkv.__file__).parent
HARNESS = Path(stage.__file__).parent
BLOCK = 16
WITHOUT_VLLM = """
import sys
sys.modules["vllm"] = None
from vllm_ssdkv.profiling.decode_harness.stage import run
from vllm_ssdkv.profiling.gpu_pack.stage import stage_main
stage_main(run, sys.argv[1:])
"""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads of small operations wait for each other longer than they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_exact_paging_are_those_of_transformers_own_cache(
    family: str, tmp_path: Path
) -> None:
    found = check_exact(family, "exact", CPU, tmp_path / "store")
    assert found["tokens_equal"] == found["tokens"] == 2 * COUNT
    assert found["different_tokens"] > COUNT / 2, "the model says the same whatever it attends to"


@pytest.mark.parametrize("selector", CHOOSING)
def test_a_selector_that_may_choose_everything_loses_nothing(
    selector: SelectorName, tmp_path: Path
) -> None:
    assert "error" not in check_exact("llama", selector, CPU, tmp_path / "store")


@pytest.mark.parametrize("selector", ON_DRIVE)
def test_where_a_context_lies_changes_no_bit(selector: SelectorName, tmp_path: Path) -> None:
    assert "error" not in check_drive(selector, CPU, tmp_path)


@pytest.mark.parametrize("scorer", ["bounds", "sparf"])
def test_clusters_come_from_the_prompt_and_go_with_the_request(scorer: str, tmp_path: Path) -> None:
    """A request decodes beside another what it decodes alone, by clusters of its own queries."""
    model: Any = make_model(small_config("llama"), CPU, torch.float32)
    asked = prompts(model.config.vocab_size)
    options = config_of("swarm", budget=0.5)
    sparse = options.sparse.model_copy(update={"scorer": scorer, "cluster_threshold": 0.9})
    options = options.model_copy(update={"sparse": sparse})
    found: list[list[int]] = []
    with PagedDecoder(model, options, ROOM, tmp_path / "store") as decoder:
        worker: Any = decoder.worker  # whose gauges the decoder drops

        def sizes() -> tuple[int, ...]:
            gauges = worker.page_mode.choices.gauges()
            names = ("sparse_clusters", "sparse_clustered_pages", "sparse_cluster_members")
            return tuple(gauges[name] for name in names)

        for names in (["a"], ["b"], ["a", "b"]):
            first = [decoder.prefill(name, asked["ab".index(name)]) for name in names]
            logits, got = torch.stack(first), []
            for _ in range(COUNT):
                ids = logits.argmax(-1)
                got.append(ids.tolist())
                logits = decoder.step(names, ids)
            found += [list(row) for row in zip(*got, strict=True)]
            clusters, pages, members = sizes()
            # Of the short one a query chooses a page beside the sink: none are together.
            assert (clusters < pages) == ("a" in names)
            assert 0 < pages <= members
            for name in names:
                decoder.forget(name)
            assert sizes() == (0, 0, 0)
    assert found[:2] == found[2:]


@pytest.mark.parametrize("durable", [True, False])
def test_a_context_may_come_from_transformers_cache(durable: bool, tmp_path: Path) -> None:
    """And with DRAM for some blocks only, if the drive has all of them."""
    model: Any = make_model(small_config("llama"), CPU, torch.float32)
    asked = prompts(model.config.vocab_size)
    want = [own_tokens(model, ids, COUNT) for ids in asked]
    config = config_of("exact")
    if durable:
        config = config.model_copy(update={"dram_gib": 5 / 1024})
    with PagedDecoder(model, config, ROOM, tmp_path / "store", durable=durable) as decoder:
        names, last = ["a", "b"], []
        for name, ids in zip(names, asked, strict=True):
            cache = DynamicCache()
            with torch.inference_mode():
                out = model(torch.tensor([ids]), past_key_values=cache, use_cache=True)
            last.append(out.logits[0, -1])
            decoder.start(name, len(ids))

            def source(
                layer: int, first: int, count: int, cache: DynamicCache = cache
            ) -> tuple[torch.Tensor, torch.Tensor]:
                held, part = cache.layers[layer], slice(first, first + count)
                key, value = (
                    one[0, :, part].transpose(0, 1).contiguous() for one in (held.keys, held.values)
                )
                return key, value

            decoder.fill(name, len(ids), source)
        assert decoder.drain(30.0)
        logits, got = torch.stack(last), []
        for _ in range(COUNT):
            ids = logits.argmax(-1)
            got.append(ids.tolist())
            logits = decoder.step(names, ids)
        read = decoder.worker.counters.total("context_pages_streamed", tier="ssd")
    assert [list(row) for row in zip(*got, strict=True)] == want
    assert (read > 0) == durable


class OneLayer:
    """A model of one layer: K, V and the last query follow from the tokens alone, so that what a
    query attends to can be worked out beside the decoder."""

    def __init__(self) -> None:
        self.model: Any = make_model(small_config("llama", layers=1), CPU, torch.float32)
        made = torch.Generator().manual_seed(3)
        self.ids = torch.randint(0, 256, (391,), generator=made).tolist()
        self.seen: dict[str, torch.Tensor] = {}
        with attention_by(self.model, self._look), torch.inference_mode():
            self.model(torch.tensor([self.ids]), use_cache=False)

    def _look(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        self.query, self.scale = query[0, :, -1], scale
        self.key, self.value = key[0].transpose(0, 1), value[0].transpose(0, 1)
        return query.transpose(1, 2)

    def attended(self, config: SSDKVConfig, directory: Path) -> tuple[torch.Tensor, int]:
        """Output of attention [Hq, D] of the last token in the harness; tokens of its context."""
        found: list[torch.Tensor] = []
        hook = self.model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(
            lambda _, given: found.append(given[0])
        )
        with PagedDecoder(self.model, config, Room(1, 512, BLOCK, 64), directory) as decoder:
            decoder.prefill("a", self.ids[:-1])
            context = decoder.context_tokens("a")
            decoder.step(["a"], torch.tensor(self.ids[-1:]))
        hook.remove()
        return found[-1][0, 0].view(self.query.shape), context

    def pages(
        self,
        scores: torch.Tensor,
        context: int,
        most: int,
        least: int | None = None,
        p: float = 1.0,
        window: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Tokens [Hkv, S] in the window, or in pages that the oracle takes by their scores."""
        heads = self.key.shape[1]
        chosen = torch.zeros((heads, len(self.ids)), dtype=torch.bool)
        chosen[:, context:] = True
        for head in range(heads):
            taken, _ = choose(
                scores[head].tolist(),
                scores[head].tolist(),
                0.0 if window is None else float(window[head]),
                sinks=1,
                least=most if least is None else least,
                most=most,
                p=p,
            )
            for page in taken:
                chosen[head, page * BLOCK : (page + 1) * BLOCK] = True
        return chosen

    def weights(self, context: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores by bounds of the context's pages, and the window's mass."""
        window = torch.zeros((self.key.shape[1], len(self.ids)), dtype=torch.bool)
        window[:, context:] = True
        _, lse = attend_chosen(self.query, self.key, self.value, window, self.scale)
        low, high = page_bounds(self.key[:context], BLOCK)
        logits = bound_logits(self.query, low, high, self.scale)
        return page_weights(logits, self.key.shape[1], BLOCK, lse)


@pytest.fixture(scope="module")
def one_layer() -> OneLayer:
    return OneLayer()


def sparse(selector: str, **options: object) -> SSDKVConfig:
    given = config_of("exact").model_dump(mode="json", exclude_unset=True)
    given["sparse"] |= options
    return SSDKVConfig.from_extra_config({**given, "selector": selector})


def allowed(tokens: int, context: int, budget: float = 1 / 8) -> int:
    """Context tokens beside the window within the budget of all but the current token."""
    return int((tokens - 1) * budget) - (tokens - 1 - context)


def test_bounds_choose_as_the_oracle_does(one_layer: OneLayer, tmp_path: Path) -> None:
    out, context = one_layer.attended(sparse("bounds", budget=0.25), tmp_path / "store")
    most = allowed(len(one_layer.ids), context, 0.25) // BLOCK
    assert 1 < most < context // BLOCK
    scores, _ = one_layer.weights(context)
    chosen = one_layer.pages(scores, context, most)
    want, _ = attend_chosen(
        one_layer.query, one_layer.key, one_layer.value, chosen, one_layer.scale
    )
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)


def test_adaptive_stops_where_the_oracle_does(one_layer: OneLayer, tmp_path: Path) -> None:
    config = sparse("adaptive", scorer="bounds", budget=0.5, floor=0.125, mass=0.9)
    out, context = one_layer.attended(config, tmp_path / "store")
    tokens = len(one_layer.ids)
    least, most = (allowed(tokens, context, share) // BLOCK for share in (0.125, 0.5))
    scores, window = one_layer.weights(context)
    chosen = one_layer.pages(scores, context, most, least=least, p=0.9, window=window)
    counts = chosen[:, :context].sum(1) // BLOCK
    assert bool((counts < most).any()), "the mass decides nothing"
    want, _ = attend_chosen(
        one_layer.query, one_layer.key, one_layer.value, chosen, one_layer.scale
    )
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)


def test_window_takes_the_first_page_and_the_newest(one_layer: OneLayer, tmp_path: Path) -> None:
    out, context = one_layer.attended(sparse("window", budget=0.25), tmp_path / "store")
    most = allowed(len(one_layer.ids), context, 0.25) // BLOCK
    newest = torch.arange(context // BLOCK, dtype=torch.float64).repeat(2, 1)
    chosen = one_layer.pages(newest, context, most)
    want, _ = attend_chosen(
        one_layer.query, one_layer.key, one_layer.value, chosen, one_layer.scale
    )
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)


def test_sparf_is_sparq(one_layer: OneLayer, tmp_path: Path) -> None:
    options = {"granularity": "token", "sink_tokens": 0, "channels": 4, "estimate_rest": True}
    config = sparse("sparf", budget=0.25, **options)
    out, context = one_layer.attended(config, tmp_path / "store")
    tokens = len(one_layer.ids)
    local = tokens - 1 - context
    k = allowed(tokens, context, 0.25) + local
    want, chosen = sparq_attention(
        one_layer.query, one_layer.key, one_layer.value, r=4, k=k, local=local
    )
    assert 0 < int(chosen[:, :context].sum()) < 2 * context
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)


# ---- the stage ----


def started(out: Path) -> subprocess.Popen[bytes]:
    """A rehearsal's process, which puts results and stores below ``out``."""
    command = [sys.executable, "-P", "-c", WITHOUT_VLLM, "--rehearse"]
    command += ["--name", "decode", "--out", str(out), "--seconds", "200"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SSDKV_GPU_SCRATCH": str(out)}
    return subprocess.Popen(command, env=environment)


def rows_of(out: Path) -> list[Row]:
    return list(read_rows(out / RESULTS))


def figures(row: Row) -> dict[str, float | str]:
    return {figure.name: figure.value for figure in row.figures}


def rehearse(out: Path, seconds: float = 200) -> list[Row]:
    """Rows of a rehearsal in this process."""
    stage.run(StageRun("decode", ResultLog(out), rehearsal=True, seconds=seconds))
    return rows_of(out)


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    """The stage ends at SIGTERM in a way of its own."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("scale", [Scale.full(), Scale.rehearsal()], ids=lambda one: one.name)
def test_memory_is_divided_as_the_product_divides_it(scale: Scale) -> None:
    """No size of a part is given where DRAM has all contexts. It has frames and summaries for them,
    and few more."""
    for group in groups(scale):
        if group.tier != "dram" or not group.layers:
            continue
        config, room = (
            options(scale, group, group.layers),
            scale.room(group.context, group.requests),
        )
        assert config.sparse.page_cache is config.sparse.summaries is None
        geometry = paged_geometry(
            config,
            group.layers,
            kv_heads(scale.config),
            head_size(scale.config),
            room.block_tokens,
            scale.dtype,
        )
        plan = MemoryPlan.of(
            geometry,
            config.dram_bytes(1),
            config.io.staging,
            scrub=True,
            choice=sparse_memory(config, room.blocks, room.blocks),
        )
        assert plan.frames > room.blocks
        assert plan.summary_rows == room.blocks
        assert plan.frames < 1.2 * room.blocks + 2 * SPARE_FRAMES


def test_what_was_measured_before_the_end_is_there(tmp_path: Path) -> None:
    process = started(tmp_path)
    deadline = time.monotonic() + 200
    while len(rows_of(tmp_path)) < 2:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    assert all(row.ok for row in rows_of(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {RESULTS, REPORT}


def test_cases_without_time_say_so(tmp_path: Path) -> None:
    rows = rehearse(tmp_path, seconds=0)
    cases = sum(len(group.cases) for group in groups(Scale.rehearsal()))
    assert len(rows) == cases + len(FAMILIES) + 2 * len(CHOOSING) + len(ON_DRIVE)
    assert {row.error for row in rows} == {NO_TIME}
    assert not any(row.ok for row in rows)


def test_a_case_that_fails_names_its_error_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object) -> dict[str, Any]:
        raise ValueError("a kernel is wrong")

    monkeypatch.setattr(stage, "check_exact", fail)
    monkeypatch.setattr(stage, "groups", lambda scale: [])
    rows = rehearse(tmp_path)
    errors = [row.error for row in rows if not row.ok]
    assert len(errors) == len(FAMILIES) + len(CHOOSING)
    assert all("ValueError: a kernel is wrong" in error for error in errors)
    assert sum(row.ok for row in rows) == len(CHOOSING) + len(ON_DRIVE)


def test_other_tokens_than_expected_are_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wrong = {"tokens": 48, "tokens_equal": 47, "error": "other tokens than expected"}
    monkeypatch.setattr(stage, "check_exact", lambda *_: dict(wrong))
    monkeypatch.setattr(stage, "check_selector", lambda *_: dict(wrong))
    monkeypatch.setattr(stage, "check_drive", lambda *_: dict(wrong))
    monkeypatch.setattr(stage, "groups", lambda scale: [])
    rows = rehearse(tmp_path)
    assert {(row.ok, row.error) for row in rows} == {(False, "other tokens than expected")}
    assert {figures(row)["tokens_equal"] for row in rows} == {47}


def test_a_model_that_cannot_be_made_is_the_error_of_every_case(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(stage, "make_model", fail)
    monkeypatch.setattr(stage.Stage, "check_tokens", lambda self: None)
    rows = rehearse(tmp_path)
    assert len(rows) == sum(len(group.cases) for group in groups(Scale.rehearsal()))
    assert all("RuntimeError: out of memory" in row.error for row in rows)


def test_a_case_that_does_not_fit_names_the_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(stage, "available_memory", lambda: 1 << 30)
    monkeypatch.setattr(stage.Stage, "check_tokens", lambda self: None)
    few = [group for group in groups(Scale.rehearsal()) if group.kind == "bounds"][:1]
    monkeypatch.setattr(stage, "groups", lambda scale: few)
    why = [str(figures(row)["not measured"]) for row in rehearse(tmp_path)]
    assert [text.partition(":")[0] for text in why] == ["does not fit DRAM"] * 3


def test_without_a_gpu_only_a_rehearsal_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="no CUDA GPU"):
        stage.run(StageRun("decode", ResultLog(tmp_path), rehearsal=False, seconds=10))


@pytest.mark.parametrize("selector", ["bounds", "spread"])
def test_summaries_in_memory_of_a_device_change_no_bit(
    selector: SelectorName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece of DRAM stands for it."""
    model: Any = make_model(small_config("llama"), CPU, torch.float32)
    asked, config = prompts(model.config.vocab_size), config_of(selector)
    wanted = paged_logits(model, config, asked, tmp_path / "dram")
    monkeypatch.setattr(device_memory, "_is_host", lambda device: False)
    sparse = {**config.sparse.model_dump(exclude_unset=True), "hbm_summaries": "16MiB"}
    held = SSDKVConfig.from_extra_config(
        {**config.model_dump(mode="json", exclude_unset=True), "sparse": sparse}
    )
    used: list[object] = []
    monkeypatch.setattr(
        page_mode, "summary_memory", lambda *a: used.append(made := take(*a)) or made
    )
    take = device_memory.summary_memory
    found = paged_logits(model, held, asked, tmp_path / "hbm")
    assert len(used) == 1
    assert found[0] == wanted[0]
    assert torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("selector", ["exact", "bounds", "sparf", "adaptive"])
def test_what_a_step_keeps_of_the_one_before_changes_no_bit(
    selector: SelectorName, tmp_path: Path
) -> None:
    """Two requests decode the same whether or not steps of a third one lie between theirs, which
    leave nothing to keep: blocks become complete, rows change places, ask for something else, end,
    and begin anew under the same name."""
    model: Any = make_model(small_config("llama"), CPU, torch.float32)
    asked, config = prompts(model.config.vocab_size), config_of(selector, budget=0.5)
    room = dataclasses.replace(ROOM, requests=3)
    found = []
    for between in (False, True):
        made = []
        with PagedDecoder(model, config, room, tmp_path / f"store {between}") as decoder:
            decoder.prefill("c", asked[1])

            def steps(
                count: int, *names: str, decoder: PagedDecoder = decoder, between: bool = between
            ) -> Iterator[torch.Tensor]:
                for number in range(count):
                    yield decoder.step(names, torch.arange(number, number + len(names)))
                    if between:
                        decoder.step(["c"], torch.tensor([number]))

            for name, ids in zip("ab", asked, strict=True):
                made.append(decoder.prefill(name, ids))
            made += steps(BLOCK + 2, "a", "b")
            made += steps(2, "b", "a")
            for other in ("window", "exact"):
                decoder.ask("a", RequestOptions(selector=other))
                made += steps(2, "b", "a")
            decoder.forget("b")
            made += steps(1, "a")
            made.append(decoder.prefill("b", asked[1][::-1]))
            decoder.ask("a", None)
            made += steps(BLOCK, "b", "a")
        found.append(torch.cat([one.flatten() for one in made]))
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("kind", "case", "most"),
    [
        ("bounds", EXACT, 140),
        ("bounds", BY_BOUNDS[1], 210),
        *(("codes", case, 216) for case in BY_CODES),
        ("sparf", BY_CHANNELS[0], 216),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_layer_calls_few_functions_of_ours(
    kind: SelectorName, case: Case, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most 12, those of the whole step spread over its layers, of which there are so many at
    ``most``. Pages in frames need no room among single pages, and a layer is one native call."""
    layers, names, tokens = 32, [f"request {number}" for number in range(8)], 2048
    scale = dataclasses.replace(Scale.rehearsal(), config=small_config("llama", layers=layers))
    cache = ("page_cache", "1MiB")
    group = Group("dram", kind, tokens, len(names), layers, (case,), sparse=(cache,))
    model = make_model(scale.config, CPU, scale.dtype)
    config, room = options(scale, group, layers), scale.room(tokens, len(names))
    monkeypatch.setattr(worker_module, "TELL_INTERVAL_S", 3600)  # gauges are not of a step
    with PagedDecoder(model, config, room, tmp_path / "store", durable=False) as decoder:
        for name in names:
            decoder.start(name, tokens)
            decoder.fill(name, tokens, stage.random_kv(decoder, time.monotonic() + 600))
            decoder.ask(name, case.asked)
        ids = torch.zeros(len(names), dtype=torch.int64)
        decoder.step(names, ids)
        calls: Counter[str] = Counter()

        def note(frame: FrameType, event: str, _argument: object) -> None:
            file = Path(frame.f_code.co_filename)
            # transformers makes a list of its layers in every step, and torch tells of each.
            ours = PACKAGE in file.parents and HARNESS not in file.parents
            if event == "call" and ours and file.name != "module_tree.py":
                calls[frame.f_code.co_qualname] += 1

        before = decoder.worker.counters.totals()
        sys.setprofile(note)
        try:
            decoder.step(names, ids)
        finally:
            sys.setprofile(None)
        after = decoder.worker.counters.totals()
        one_turn = decoder.opened.plan.page_places // 2
    selected = counter_key("sparse_pages_selected")
    chosen = after.get(selected, 0) - before.get(selected, 0)
    assert chosen == 0 if case == EXACT else chosen > layers * one_turn
    assert calls["DecodePlan.attend"] == layers
    assert calls.total() <= 12 * layers, calls
    of_step = Counter({name: count for name, count in calls.items() if count < layers})
    assert of_step.total() <= most, of_step
