"""Plans by their properties: what better machines give, what does not fit, what is told."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.base.sizes import GIB
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.profiling.simulation.model_shape import ModelShape, find_model
from vllm_ssdkv.profiling.sizing.costs import MEASURED_MISSES
from vllm_ssdkv.profiling.sizing.forecast import BoundError, Choice, Sizing, busiest
from vllm_ssdkv.profiling.sizing.machine import (
    MachineFile,
    SizedMachine,
    checked,
    machine_of,
    read_machine,
)
from vllm_ssdkv.profiling.sizing.plan import (
    SELECTORS,
    Plan,
    Wish,
    best_of,
    choices,
    curves,
    make_plan,
    parts,
)
from vllm_ssdkv.profiling.sizing.serve import serve_command, transfer_config
from vllm_ssdkv.profiling.sizing.workload import Workload

LLAMA = replace(find_model("llama-3.1-8b"), positions=None)
"""Without its bound of tokens: those of memory and drives are looked at."""


NODES: dict[str, Any] = {
    "addresses": ["tcp://10.0.0.1:8470", "tcp://10.0.0.2:8470"],
    "network": "ethernet-25g",
}
NODES |= {"state_dir": "/srv/kv", "memory_bandwidth": 50e9}
CARD = {"xclbin": "/srv/kernels.xclbin", "attend_bandwidth": 11.6e9}


def machine(
    drives: int = 2,
    dram: float = 64 * GIB,
    gpu: str = "a100-40",
    **more: Any,  # noqa: ANN401 - as YAML has it
) -> SizedMachine:
    entry = {"kind": "pm9a3", "count": drives, "capacity_bytes": "2TB", "endurance_bytes": 3e15}
    given = {"gpu": gpu, "gpu_link": "pcie4-x16", "dram": dram, "drives": [entry]}
    given |= more
    return machine_of(checked(MachineFile, given, "test"), "test")


def sizing(prompt: float = 16384, *, at_a_time: int = 4, **other: float) -> Sizing:
    work = Workload(prompt, 256, int(prompt) + 256, at_a_time, other.get("found", 0.0))
    on = machine(int(other.get("drives", 2)), other.get("dram", 64 * GIB))
    return Sizing(LLAMA, work, on)


WAYS = st.sampled_from(
    [
        *(Choice("reuse"), Choice("page"), Choice("page", offload="host")),
        *(Choice("page", name) for name in SELECTORS[1:]),
    ]
)


@given(
    way=WAYS,
    batch=st.sampled_from([1, 2, 4]),
    prompt=st.integers(2048, 100_000),
    drives=st.integers(1, 6),
    dram=st.sampled_from([8.0, 32.0, 96.0]),
    found=st.sampled_from([0.0, 0.5, 0.95]),
)
@settings(deadline=None, max_examples=15)
def test_no_purchase_makes_a_way_slower(
    way: Choice, batch: int, prompt: int, drives: int, dram: float, found: float
) -> None:
    here = sizing(prompt, drives=drives, dram=dram * GIB, found=found, at_a_time=batch)
    choice = replace(way, batch=batch)
    try:
        before = here.forecast(choice)
    except BoundError:
        return
    for name, _, better in parts(here.machine):
        after = replace(here, machine=better).forecast(choice)
        assert after.tokens_per_s >= before.tokens_per_s * (1 - 1e-6), name
        assert after.hit_ttft_s <= before.hit_ttft_s * (1 + 1e-6), name


def test_a_drive_is_busy_for_no_more_than_it_can() -> None:
    for way in (Choice("page", batch=4), Choice("page", "bounds", batch=4)):
        found = sizing(65536).forecast(way)
        assert found.read_bytes_per_s <= machine().drives[0].read_bandwidth
        assert found.tokens_per_s <= found.decode_tokens_per_s


def test_codes_take_little_of_dram_and_drives() -> None:
    """In blocks of 16 a 12th of the KV in 16 bit, where channels take half and a sum of V; and as
    much less of the slots on the drives."""
    given = sizing(65536)
    found = {
        name: given.forecast(Choice("page", name, batch=2)) for name in ("exact", "codes", "sparf")
    }
    kv = 2 * given.workload.longest * LLAMA.kv_bytes_per_token()
    held = {name: one.dram.get("summaries", 0.0) / kv for name, one in found.items()}
    assert held["codes"] == pytest.approx(1 / 12.2, rel=0.02)
    assert held["sparf"] > 6 * held["codes"]
    stored = {name: one.tier_bytes["drives"] for name, one in found.items()}
    assert 1 < stored["codes"] / stored["exact"] < 1.1 < stored["sparf"] / stored["exact"]
    assert set(MEASURED_MISSES) == set(SELECTORS[1:])


def test_what_is_found_is_not_computed_nor_written() -> None:
    none, most = (sizing(found=part).forecast(Choice("reuse", batch=2)) for part in (0.0, 0.9))
    assert none.ttft_s == most.ttft_s
    assert none.hit_ttft_s == none.ttft_s
    assert most.hit_ttft_s < none.hit_ttft_s / 3
    per_token = [one.written_bytes_per_s / one.tokens_per_s for one in (none, most)]
    assert per_token[1] == pytest.approx(per_token[0] * (1638.4 + 256) / (16384 + 256))


def test_life_is_endurance_by_what_is_written() -> None:
    found = sizing().forecast(Choice("reuse", batch=2))
    assert found.life_years is not None
    days = 3e15 / (found.written_bytes_per_s * 86_400)
    assert found.life_years == pytest.approx(days / 365)
    # Every token of a request is written once, header and all, over two drives.
    requests_per_s = found.tokens_per_s / 256
    assert found.written_bytes_per_s * 2 == pytest.approx(
        requests_per_s * (16384 + 256) * LLAMA.kv_bytes_per_token(), rel=0.01
    )


def test_the_plan_is_exact_unless_the_wish_needs_more() -> None:
    long = sizing(200_000, at_a_time=2)
    exact = make_plan(long, Wish())
    assert exact.best.choice == Choice("page", batch=exact.best.choice.batch)
    assert [one.startswith("reuse: HBM for KV") for one in exact.refused] == [True]
    wish = Wish(tokens_per_s=2 * exact.best.tokens_per_s)
    assert make_plan(long, wish).best.choice.selector in SELECTORS[1:]
    assert make_plan(sizing(), Wish()).best.choice.mode == "reuse"


def test_a_wish_that_is_not_possible_names_the_bound_last() -> None:
    with pytest.raises(ConfigError) as told:
        make_plan(sizing(), Wish(tokens_per_s=1e6))
    last = str(told.value).splitlines()[-1]
    assert last.startswith("impossible: reuse: tokens/s: 1e+06 wanted, ")
    best = make_plan(sizing(), Wish()).best
    assert f"(a factor of {1e6 / best.tokens_per_s:.3g})" in last
    with pytest.raises(ConfigError, match=r"drive life: 1e\+06 years wanted"):
        make_plan(sizing(), Wish(life_years=1e6))
    with pytest.raises(ConfigError, match="TTFT: 1e-06 s wanted"):
        make_plan(sizing(), Wish(ttft_s=1e-6))


def test_drives_that_wear_out_get_a_limit_of_writes() -> None:
    """Endurance by days of the wish; hits become as much fewer as there is less written."""
    on = replace(machine(), paths=("/a", "/b"))
    given = replace(sizing(found=0.8, at_a_time=2), machine=on)
    worn = given.forecast(Choice("reuse", batch=2))
    assert worn.life_years is not None
    assert worn.life_years < 5
    for wish, years in ((Wish(), 5), (Wish(life_years=8), 8)):
        made = make_plan(given, wish, selectors=["exact"])
        assert made.best.life_years == years
        daily = made.best.choice.daily_writes
        assert daily == pytest.approx(3e15 / (years * 365), rel=1e-6)
        options = transfer_config(made.sizing, made.best)["kv_connector_extra_config"]
        assert options["admission"] == "second_use"
        assert [one["daily_write_budget"] for one in options["devices"]] == [daily] * 2
        work = replace(given.workload, found=0.8 * worn.life_years / years)
        fewer = replace(given, workload=work).forecast(Choice("reuse", batch=2))
        assert made.best.hit_ttft_s == fewer.hit_ttft_s > worn.hit_ttft_s
    assert make_plan(given, Wish(life_years=worn.life_years)).best.choice.daily_writes is None
    paged = make_plan(replace(sizing(200_000, at_a_time=2, found=0.0), machine=on), Wish())
    assert paged.best.choice.mode == "page"
    life = paged.best.life_years
    assert [one.startswith("drives last ") for one in paged.warnings] == (
        [True] if life < 5 else []
    )


def test_a_wish_for_life_needs_endurance() -> None:
    drives = tuple(one.model_copy(update={"endurance_bytes": None}) for one in machine().drives)
    unknown = replace(sizing(), machine=replace(machine(), drives=drives))
    assert make_plan(unknown, Wish()).best.life_years is None
    with pytest.raises(ConfigError, match=r"--want-life: .* give --endurance"):
        make_plan(unknown, Wish(life_years=1))


def test_what_keeps_more_from_running_is_told() -> None:
    best = make_plan(sizing(32768, at_a_time=32), Wish(), selectors=["exact"]).best
    assert best.choice.batch < 32
    assert best.notes[-1].startswith(
        f"no more at a time: HBM for KV of {best.choice.batch + 1} requests: "
    )
    notes = make_plan(sizing(4096, at_a_time=1), Wish(), selectors=["exact"]).best.notes
    assert not any(note.startswith("no more") for note in notes)


def test_the_largest_batch_that_fits_is_between_powers_of_two() -> None:
    """(36 - 16.06) GB / (33,024 x 128 KiB) = 4.6 requests."""
    way, *_ = choices(32, [], 0.125)
    assert best_of(sizing(32768), way, Wish()).choice.batch == 4
    assert best_of(sizing(24576), way, Wish()).choice.batch == 6


def test_chunks_become_smaller_before_answers_change() -> None:
    """Llama-3.1-70B on two H100 leaves 2.7 GiB: 8,192 tokens of a chunk alone take 2.5."""
    on = machine_of(
        checked(
            MachineFile,
            {"gpu": "h100-80", "gpus": 2, "dram": 256 * GIB, "drives": [{"kind": "pm9a3"}]},
            "test",
        ),
        "test",
    )
    work = Workload(65024, 512, 65536, 6)
    given = Sizing(find_model("llama-3.1-70b"), work, on)
    with pytest.raises(BoundError, match="HBM for windows and a chunk of a prompt"):
        given.forecast(Choice("page", batch=6))
    best = best_of(given, [Choice("page", batch=6)], Wish())
    assert best.choice == Choice("page", batch=6, chunk=2048)
    assert "--max-num-batched-tokens 2048" in serve_command(given, best, "m")
    least = best_of(replace(given, workload=replace(work, at_a_time=1)), [Choice("page")], Wish())
    assert least.choice.chunk == 4096


def test_the_last_projection_is_read_in_each_step() -> None:
    """Llama-3.1-8B reads 128,256 x 4,096 numbers of 2 bytes at 0.896 of 1.555 TB/s: 0.75 ms."""
    given = sizing()
    head = replace(LLAMA.weights, head=0)
    without = replace(given, model=replace(LLAMA, weights=head))
    for way in (Choice("reuse"), Choice("page")):
        more = given.forecast(way).step_s - without.forecast(way).step_s
        assert more == pytest.approx(128_256 * 4096 * 2 / (0.896 * 1.555e12), rel=1e-6)


def test_ways_that_may_change_answers_point_to_their_accuracy() -> None:
    long = sizing(200_000, at_a_time=2)
    exact = make_plan(long, Wish(), selectors=["exact", "adaptive"])
    assert exact.warnings == () or all("accuracy" not in one for one in exact.warnings)
    assert "with a selector, answers may differ" in exact.tables()[1].note
    wish = Wish(tokens_per_s=2 * exact.best.tokens_per_s)
    chosen = make_plan(long, wish, selectors=["exact", "adaptive"])
    assert chosen.best.choice.selector == "adaptive"
    assert chosen.warnings[0].startswith("adaptive: answers may differ")
    assert "docs/accuracy.md" in chosen.tables()[0].note
    eight = replace(sizing(), model=replace(LLAMA, kv_dtype="fp8"))
    plain, small = (one.forecast(Choice("reuse")) for one in (sizing(), eight))
    assert small.tier_bytes["hbm"] == plain.tier_bytes["hbm"] / 2
    made = make_plan(eight, Wish())
    assert made.warnings[0].startswith("KV in fp8: answers may differ")
    assert any("of KV in fp8 mode page chooses no pages" in one for one in made.refused)
    wide, narrow = (one.forecast(Choice("page", "exact")) for one in (sizing(), eight))
    assert narrow.tier_bytes["hbm"] == wide.tier_bytes["hbm"] / 2
    assert "--kv-cache-dtype fp8" in serve_command(eight, made.best, "m")


def test_less_room_than_a_step_chooses_is_told() -> None:
    choice = Choice("page", "bounds", batch=4)
    (note,) = sizing(100_000, dram=10 * GIB).forecast(choice).notes
    assert note.startswith("DRAM keeps ")
    assert "drives may be asked for more than is forecast" in note
    assert sizing(100_000, dram=96 * GIB).forecast(choice).notes == ()


def test_what_never_fits_names_the_nearest_bound() -> None:
    with pytest.raises(ConfigError) as told:
        make_plan(sizing(90_000_000, at_a_time=1), Wish())
    last = str(told.value).splitlines()[-1]
    assert last.startswith("impossible: capacity of the drives: ")
    assert "too little" in last
    large = replace(sizing(), model=replace(find_model("opt-175b"), positions=None))
    with pytest.raises(ConfigError, match="HBM for weights"):
        make_plan(large, Wish())


def test_more_tokens_than_the_model_has_positions_names_the_field() -> None:
    model = find_model("llama-3.1-8b")
    most = 131_072
    fits = Workload(most - 256, 256, most, 1)
    assert make_plan(replace(sizing(), model=model, workload=fits), Wish()).best.choice.batch == 1
    long = replace(fits, prompt=most - 255, longest=most + 1)
    with pytest.raises(ConfigError) as told:
        make_plan(replace(sizing(), model=model, workload=long), Wish())
    assert str(told.value).startswith(
        "impossible: max_position_embeddings of llama-3.1-8b: 131,072 tokens, the longest request "
        "has 131,073 with its output, 1 too many; "
    )
    assert long.at_most(most).longest == most


@pytest.mark.parametrize("name", ["tokens_per_s", "ttft_s", "life_years"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_wish_is_a_number(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=r"--want-(tokens|ttft|life)"):
        Wish(**{name: value})


def latents() -> ModelShape:
    shape = {"model_type": "deepseek_v2", "num_hidden_layers": 2, "hidden_size": 256}
    shape |= {"num_attention_heads": 4, "kv_lora_rank": 64, "qk_rope_head_dim": 16}
    shape |= {"qk_nope_head_dim": 16, "v_head_dim": 16, "vocab_size": 512}
    return ModelShape.of({**shape, "dtype": "bfloat16"}, name="latent")


def test_latents_are_stored_once_and_loaded_by_every_gpu() -> None:
    """Every GPU has them in HBM; with nodes each has a copy of its own there, too."""
    bytes_of: dict[tuple[str, int, bool], tuple[float, float, float]] = {}
    for model in (LLAMA, latents()):
        for gpus, more in ((1, {}), (4, {}), (1, {"nodes": NODES}), (4, {"nodes": NODES})):
            given = sizing(found=0.5)
            on = machine(gpus=gpus, **more)
            given = replace(given, model=model, machine=on)
            found = given.forecast(Choice("reuse", batch=2))
            rate = found.written_bytes_per_s
            bytes_of[model.name, gpus, bool(more)] = (
                found.tier_bytes["hbm"],
                found.tier_bytes["drives"],
                found.read_bytes_per_s / rate,
            )
    for nodes in (False, True):
        assert bytes_of[LLAMA.name, 4, nodes] == pytest.approx(bytes_of[LLAMA.name, 1, nodes])
        one, four = (bytes_of["latent", gpus, nodes] for gpus in (1, 4))
        times = (4, 4, 1) if nodes else (4, 1, 4)  # HBM, drives, reads by writes
        assert four == pytest.approx([n * of for n, of in zip(times, one, strict=True)])


def test_a_model_without_plain_attention_has_no_page_mode() -> None:
    made = make_plan(replace(sizing(), model=latents()), Wish())
    assert made.best.choice.mode == "reuse"
    assert any("mode page serves attention layers that are alike" in one for one in made.refused)


def test_a_model_without_kv_has_no_plan() -> None:
    shape = {"model_type": "mamba2", "num_hidden_layers": 2, "hidden_size": 256, "num_heads": 8}
    shape |= {"state_size": 16, "head_dim": 64, "n_groups": 1, "expand": 2, "conv_kernel": 4}
    shape |= {"vocab_size": 512}
    model = ModelShape.of({**shape, "dtype": "bfloat16"}, name="states")
    with pytest.raises(ConfigError, match="states: no layer has KV"):
        make_plan(replace(sizing(), model=model), Wish())


def test_options_are_those_that_the_engine_takes(tmp_path: Path) -> None:
    on = replace(machine(), paths=(str(tmp_path / "a"), str(tmp_path / "b")))
    made = make_plan(replace(sizing(200_000, at_a_time=2), machine=on), Wish(), selectors=["exact"])
    config = transfer_config(made.sizing, made.best)
    options = SSDKVConfig.from_extra_config(config["kv_connector_extra_config"])
    assert (options.mode, options.selector) == ("page", "exact")
    assert len(config["kv_connector_extra_config"]["devices"]) == 2
    command = serve_command(made.sizing, made.best, "some/model")
    assert command.startswith("vllm serve some/model --max-model-len 200256 --max-num-seqs ")
    assert "--attention-backend CUSTOM" in command
    processor = replace(made.sizing, machine=replace(on, cpu=True))
    told = serve_command(processor, made.best, "m")
    assert "--kv-cache-memory-bytes" in told
    assert "--attention-backend" not in told


def schema(value: object) -> object:
    """Names and kinds of a document, without its values."""
    if isinstance(value, dict):
        return {name: schema(inner) for name, inner in value.items()}
    return [schema(value[0])] if isinstance(value, list | tuple) and value else type(value).__name__


def test_the_document_has_the_fields_that_others_read() -> None:
    found = make_plan(sizing(), Wish()).document()
    assert list(found) == [
        *("schema", "model", "workload", "machine", "best", "others", "refused", "warnings"),
        "purchases",
    ]
    assert found["schema"] == 1
    assert (
        schema(found["purchases"])
        == [
            {
                "name": "str",
                "usd": "float",
                "gain": "float",
                "ttft_gain": "float",
                "tokens_per_s": "float",
                "hit_ttft_s": "float",
            }
        ]
        or found["purchases"][0]["usd"] is None
    )
    assert list(found["best"]) == [
        *("choice", "tokens_per_s", "decode_tokens_per_s", "step_s", "ttft_s", "hit_ttft_s"),
        *("tier_bytes", "dram", "read_bytes_per_s", "written_bytes_per_s", "life_years"),
        *("watts", "usd_per_million", "limit", "notes"),
    ]
    assert set(found["best"]["tier_bytes"]) == {"hbm", "dram", "drives"}


def test_purchases_are_told_by_what_they_change(tmp_path: Path) -> None:
    made: Plan = make_plan(sizing(200_000, at_a_time=4), Wish(), selectors=["exact"])
    gains = [round(one.gain, 6) for one in made.purchases]
    assert gains == sorted(gains, reverse=True)
    assert "one drive more" in [one.name for one in made.purchases]
    text = "\n".join(table.markdown() for table in made.tables())
    assert f"Most would change: {made.purchases[0].name}" in text
    assert set(curves(made.sizing, ["exact"], 0.125)) == {"page, exact"}


def test_who_attends_near_storage_is_a_way_of_its_own() -> None:
    """Ways near storage are of exact attention, and of machines that have them; a simpler way that
    is as fast wins."""
    near = {
        "": [],
        "host": [("host", False), ("host", True)],
        "fpga": [("fpga", False), ("fpga", True)],
        "node": [("node", False)],
    }
    more: dict[str, dict[str, Any]] = {"": {}, "host": {"dram_bandwidth": 200e9}}
    more |= {"fpga": {"fpga": CARD}, "node": {"nodes": NODES}}
    for kind, ways in near.items():
        on = machine(**more[kind])
        found = [way[0] for way in choices(4, ["exact", "codes"], 0.1, on)]
        assert [(one.offload, one.x) for one in found if one.offload] == ways
        assert len(found) == 3 + len(ways)
        assert not any(way[0].offload for way in choices(4, ["codes"], 0.1, on))
    long = replace(sizing(200_000, at_a_time=1), machine=machine(**more["host"]))
    made = make_plan(long, Wish(), selectors=["exact"])
    assert made.best.choice.text == "page, exact, offload host"
    assert made.best.choice.exact
    plain = next(one for one in made.others if one.choice.offload is None)
    assert made.best.tokens_per_s > plain.tokens_per_s
    assert any("X of llama-3.1-8b is 2 times its K and V" in one for one in made.refused)
    # Cores that are as fast as the link bring too little for a part more.
    slow = replace(long, machine=machine(dram_bandwidth=1e9))
    assert make_plan(slow, Wish(), selectors=["exact"]).best.choice.offload is None


def test_near_storage_refuses_what_the_engine_refuses() -> None:
    on = machine(dram_bandwidth=200e9, fpga=CARD)
    given = replace(sizing(), machine=on)
    eight = replace(given, model=replace(LLAMA, kv_dtype="fp8"))
    with pytest.raises(ConfigError, match="KV in fp8 is attended to by the accelerator alone"):
        eight.forecast(Choice("page", offload="host"))
    odd = replace(given, model=find_model("jurassic-1-178b"))
    with pytest.raises(ConfigError, match="heads of 64, 128 or 256 channels in 16 bit, not 144"):
        odd.forecast(Choice("page", offload="fpga"))
    opt = replace(find_model("opt-13b"), positions=None)
    two = replace(given, model=opt, machine=machine(gpu="h100-80", gpus=2, dram_bandwidth=2e11))
    with pytest.raises(ConfigError, match="X is for engines of one GPU"):
        two.forecast(Choice("page", offload="host", x=True))
    drives = machine(drives=64, gpu="h100-80", dram_bandwidth=4e13, drives_link=4e12)
    fast = replace(given, model=opt, machine=replace(drives, gpu_link=1e9))
    assert fast.forecast(Choice("page", offload="host")).step_s
    with pytest.raises(ConfigError, match="storage is not the limit, so the best share is 0"):
        replace(
            fast, machine=replace(fast.machine, gpu=drives.gpu.with_figures(flops=1e9))
        ).forecast(Choice("page", offload="host", x=True))


def test_memory_for_x_is_not_vllms() -> None:
    """4 requests of 16 tokens and a chunk of 8,192 x 5,120 numbers x 2 bytes x 40 layers."""
    opt = replace(find_model("opt-13b"), positions=None)
    on = machine(gpu="h100-80", dram=16 * GIB, dram_bandwidth=200e9)
    given = replace(sizing(), model=opt, machine=on)
    found = best_of(given, [Choice("page", batch=4, offload="host", x=True)], Wish())
    large = Choice("page", batch=4, offload="host", chunk=38_000)
    assert given.forecast(large).step_s
    with pytest.raises(BoundError, match="HBM for windows and a chunk of a prompt"):
        given.forecast(replace(large, x=True))
    nbytes = (4 * 16 + found.choice.chunk) * 5120 * 2 * 40
    command = serve_command(given, found, "m")
    told = float(command.split("--gpu-memory-utilization ")[1].split()[0])
    assert 0.9 - nbytes / 80e9 - 0.001 < told <= 0.9 - nbytes / 80e9
    config = transfer_config(given, found)["kv_connector_extra_config"]
    assert config["offload"] == {"kind": "host", "x_share": "auto"}


def test_the_figures_of_data_sheets_are_not_reached() -> None:
    """Stated with the plan, and changed in --machine."""
    plain, full = machine(), machine(efficiency=dict.fromkeys(("gpu_bandwidth", "drives"), 1.0))
    assert full.gpu.bandwidth == 1.555e12
    assert plain.gpu.bandwidth == 0.896 * 1.555e12
    assert plain.gpu.flops == full.gpu.flops == 0.8 * 312e12
    assert full.drives[0].read_bandwidth == 6.9e9
    assert plain.drives[0].iops == pytest.approx(0.95 * 1.1e6)
    assert "gpu_bandwidth 1, gpu_flops 0.8, links 0.85, drives 1" in full.notes[0]
    parts = {group: plain.efficiency.attends(group) for group in (1, 2, 4, 5, 8, 16)}
    assert parts == {1: 0.72, 2: 0.66, 4: 0.66, 5: 0.46, 8: 0.46, 16: 0.46}
    assert machine(efficiency={"attention": 0.3}).efficiency.attends(1) == 0.3
    found = make_plan(sizing(), Wish(), selectors=["exact"])
    assert found.document()["machine"]["efficiency"]["links"] == 0.85
    assert plain.notes[0] in found.tables()[0].note


def test_drives_of_nodes_are_behind_their_ports() -> None:
    """Two ports of 3.125 GB/s for four drives: 1.5625 GB/s each, and the engine's own port."""
    on = machine(drives=4, nodes=NODES)
    assert [one.read_bandwidth for one in on.reached] == [1.5625e9] * 4
    assert on.drives_link == 3.125e9
    assert on.reached[0].latency_s == pytest.approx(85e-6 + 2 * 15e-6 + 297e-6)
    worn = replace(sizing(found=0.8, at_a_time=2), machine=on)
    made = make_plan(worn, Wish(), selectors=["exact"])
    assert made.best.choice.daily_writes is None
    assert made.best.dram == {}
    assert transfer_config(worn, made.best)["kv_connector_extra_config"] == {
        "mode": "reuse",
        "nodes": list(NODES["addresses"]),
    }


def test_two_gpus_count_as_their_sum(tmp_path: Path) -> None:
    file = tmp_path / "machine.yaml"
    file.write_text("gpu: a100-40\ngpus: 2\ndram: 64GiB\ndrives: [{kind: pm9a3}]\n")
    found, one = read_machine(file), machine()
    assert found.gpu.flops == 2 * one.gpu.flops
    assert found.gpu_link == 0.85 * 2 * 32e9
    assert found.watts is not None
    assert found.price_usd is not None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("gpu: h1\ndram: 1GiB\ndrives: [{kind: pm9a3}]", "gpu: gpus: 'h1' is not described"),
        ("gpu: a6000\ndram: 1Q\ndrives: [{kind: pm9a3}]", "dram: got '1Q'; unknown unit"),
        ("gpu: a6000\ndram: 1GiB\ndrives: []", "drives: got"),
        ("gpu: a6000\ndram: 1GiB\ndrives: [{kind: none}]", "drives[0]: drives: 'none' is not"),
        ("gpu: a6000\ndram: 1GiB\ndrives: [{iops: 9}]", "drives[0]: read_bandwidth: missing"),
        ("gpu: a6000\ndram: 1GiB\ndrives: [{kind: pm9a3, count: 0}]", "drives[0].count: got 0"),
        ("gpu: a6000\ndram: 1GiB\nram: 1\ndrives: [{kind: pm9a3}]", "ram: got 1; unknown; known"),
        ("gpu: {flops: 1}\ndram: 1GiB\ndrives: [{kind: pm9a3}]", "gpu.memory_bytes: "),
        ("gpu: a6000\ndrives: [{kind: pm9a3}]", "dram: "),
        (
            "gpu: a6000\ndram: 1GiB\ndrives: [{kind: pm9a3}]\nefficiency: {links: 2}",
            "efficiency.links: got 2",
        ),
        (
            "gpu: a6000\ndram: 1GiB\ndrives: [{kind: pm9a3}]\n"
            "nodes: {addresses: [a:1], network: x, state_dir: /s}",
            "nodes.network: networks: 'x' is not described",
        ),
        ("- 1", "give an object"),
        ("a: [", "is no YAML"),
    ],
)
def test_nonsense_of_a_machine_names_the_field(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "machine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as found:
        read_machine(file)
    assert told in str(found.value)
    assert str(file) in str(found.value)


def test_the_busiest_drive_has_more_than_the_mean() -> None:
    assert busiest(100, 1) == 1.0
    assert 1 < busiest(1000, 4) < busiest(10, 4) <= 4.0
    # More drives never have more to do, the busiest of them.
    for requests in (1, 7, 50, 1000):
        shares = [busiest(requests, drives) / drives for drives in range(1, 33)]
        assert all(b <= a + 1e-9 for a, b in itertools.pairwise(shares))
