"""Bytes that change behind our back, in mid-flight and between runs: never a wrong token."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.bench import CHUNK, HANG_S, PROMPTS, WINDOW, Bench, engine_options, flip_bit
from tests.e2e.stock import Stock
from tests.e2e.workload import kv_tokens
from tests.kit.engine import Engine
from vllm_ssdkv.base.errors import FormatError
from vllm_ssdkv.store.format.journal_record import HEADER_BYTES, JOURNAL, RECORD_BYTES
from vllm_ssdkv.store.format.manifest import COPY, NAME
from vllm_ssdkv.store.format.superblock import COPY_OFFSETS

StartBench = Callable[..., Bench]

STRIKE = 10
"""Step of the damage: prompts are half computed, and their contexts on the devices."""

SOAK = pytest.mark.soak
QUIET = ("checksum_failures", "header_mismatches", "load_failures", "journal_corrupt_records")


# ---- in mid-flight ----


def test_pages_that_change_under_running_requests(bench: StartBench, log: list[str]) -> None:
    """So do the files that say what is stored: they are gone."""
    here = bench()
    geometry = here.scheduler.rebalancer.placement.geometry
    struck: list[int] = []

    def strike(step: int) -> None:
        if step in (STRIKE, STRIKE + 15):
            slot = here.context(f"{here.turn}.0")[step // 3]
            here.flip(slot, geometry.page_offset(geometry.pages // 2) + 1000)
            struck.append(slot)
        if step == STRIKE:
            for name in (JOURNAL, NAME, COPY):
                Path(here.paths[0], name).unlink()
            Path(here.paths[2], COPY).unlink()

    here.ask(strike)
    assert len(struck) == 2
    assert here.count("state_files_restored", file=JOURNAL) == 1
    assert here.count("checksum_failures") > 0
    assert here.count("slots_dropped", cause="read_error") > 0
    assert any(str(slot) in line for slot in struck for line in log if "checksums" in line)
    assert [here.count("device_lost", device=path) for path in here.paths] == [0] * 4
    here.ask()
    here.assert_clean()
    copies = [Path(here.paths[0], name) for name in (NAME, COPY)]
    copies.append(Path(here.paths[2], COPY))
    end = time.monotonic() + HANG_S
    while not all(path.exists() for path in copies):
        assert time.monotonic() < end
        time.sleep(0.05)
    before = len(here.stored(0))
    here.restart()
    assert len(here.stored(0)) == before > 90
    assert here.count("journal_rebuilds") == here.count("manifest_restores") == 0


def test_a_data_file_cut_off_under_running_requests(bench: StartBench) -> None:
    here = bench()

    def strike(step: int) -> None:
        if step == STRIKE:
            with open(Path(here.paths[1], "rank0.data"), "r+b") as file:
                file.truncate(1 << 20)

    here.ask(strike)
    # Behind its end there is nothing to read, or zeros once a later slot was written.
    short = here.count("io_errors", device=here.paths[1], kind="short")
    assert short + here.count("checksum_failures") > 0
    here.ask()
    here.assert_clean()


def test_a_device_directory_removed_under_running_requests(
    bench: StartBench, log: list[str]
) -> None:
    here = bench()

    def strike(step: int) -> None:
        if step == STRIKE:
            shutil.rmtree(here.paths[1])

    here.ask(strike)
    assert here.count("device_lost", device=here.paths[1]) == 1
    assert any(here.paths[1] in line and "its data file was removed" in line for line in log)
    here.assert_clean()
    # It comes back, empty, and so does its share of the store.
    here.restart()
    here.ask()
    assert here.count("device_lost", device=here.paths[1]) == 1
    assert here.count("device_state", device=here.paths[1]) == 1
    here.assert_clean()


# ---- between runs ----


def filled(bench: StartBench, mode: str = "page") -> tuple[Bench, list[int]]:
    """An engine that has stored all prompts, and the slots of the longest."""
    here = bench(mode)
    here.ask()
    slots = here.stored(0)
    assert len(slots) > 90
    return here, slots


@pytest.mark.parametrize(
    ("part", "mode"),
    [
        ("page", "page"),
        ("header", "reuse"),
        pytest.param("header", "page", marks=SOAK),
        pytest.param("page", "reuse", marks=SOAK),
    ],
)
def test_slots_that_changed(bench: StartBench, mode: str, part: str, log: list[str]) -> None:
    here, slots = filled(bench, mode)
    geometry = here.scheduler.rebalancer.placement.geometry
    struck = (3, 40, 70)
    for number in struck:
        page = geometry.page_offset(number % geometry.pages)
        here.flip(slots[number], 24 if part == "header" else page + 77)
    here.restart()
    here.ask()
    if part == "header":
        assert here.count("header_mismatches") > 0
    else:
        assert here.count("checksum_failures") > 0
    # Not every one is met: what follows the first is computed again in any case.
    assert any(str(slots[number]) in line for number in struck for line in log if "dropped" in line)
    assert here.count("hit_tokens") > 0
    # What was bad is stored anew. In reuse mode a run meets one of them after the other.
    for _ in range(1 if mode == "page" else len(struck)):
        here.restart()
        here.ask()
    assert [here.count(name) for name in QUIET] == [0] * len(QUIET)
    here.assert_clean()


def test_journal_records_that_changed(bench: StartBench) -> None:
    here, slots = filled(bench)
    here.engine.close()
    journal = Path(here.paths[0], "journal")
    for number in (0, 17, 50):
        flip_bit(journal, HEADER_BYTES + number * RECORD_BYTES + 20)
    flip_bit(journal, journal.stat().st_size - 1)
    here.start()
    here.ask()
    assert here.count("recovered_slots") >= len(slots) - 4
    assert here.count("journal_corrupt_records") == 4
    assert here.count("header_mismatches") == 0
    here.assert_clean()


@pytest.mark.parametrize("damage", ["header", "half", "gone"])
def test_a_journal_that_is_no_journal(bench: StartBench, damage: str) -> None:
    """Headers of slots say what it said, unless it is whole and ends too early."""
    here, slots = filled(bench)
    here.engine.close()
    journal = Path(here.paths[0], "journal")
    if damage == "header":
        flip_bit(journal, 17)
    elif damage == "half":
        journal.write_bytes(journal.read_bytes()[: HEADER_BYTES + 20 * RECORD_BYTES + 31])
    else:
        journal.unlink()
    here.start()
    here.ask()
    if damage == "half":
        assert here.count("journal_corrupt_records") == 1
        assert here.count("recovered_slots") == 20
    else:
        assert here.count("recovered_slots") >= len(slots)
        assert here.count("journal_rebuilds") == 1
        assert here.count("hit_tokens") > 0
    assert here.count("header_mismatches") == here.count("checksum_failures") == 0
    here.assert_clean()


def test_a_superblock_copy_that_changed(bench: StartBench, log: list[str]) -> None:
    here, _ = filled(bench)
    here.engine.close()
    for path, offset in zip(here.paths, (*COPY_OFFSETS, *COPY_OFFSETS), strict=True):
        flip_bit(Path(path, "rank0.data"), offset + 100)
    here.start()
    assert sum("the superblock at" in line and "is damaged" in line for line in log) == 4
    here.ask()
    assert here.count("hit_tokens") > 0
    assert here.count("header_mismatches") == 0


def test_what_identifies_the_store_changed(bench: StartBench) -> None:
    """One of both is enough, a manifest or superblocks. Where they are not, a start is refused by
    name before a byte is written; mended, it goes on with all it had."""
    here, _ = filled(bench)
    here.engine.close()
    data = Path(here.paths[2], "rank0.data")
    for offset in COPY_OFFSETS:
        flip_bit(data, offset + 100)
    with pytest.raises(FormatError, match=f"{data} is not empty"):
        here.start()
    for offset in COPY_OFFSETS:
        flip_bit(data, offset + 100)
    manifests = [Path(here.paths[0], name) for name in (NAME, COPY)]
    here.start()
    here.ask()
    assert here.count("hit_tokens") > 0
    assert here.count("header_mismatches") == 0
    here.engine.close()
    for path in manifests:
        flip_bit(path, 1)
    here.start()
    here.ask()
    assert here.count("manifest_restores") == 1
    assert here.count("hit_tokens") > 0, "the other devices have copies"
    here.engine.close()
    for path in (manifests[0], *(Path(device, COPY) for device in here.paths)):
        flip_bit(path, 1)
    here.start()
    here.ask()
    assert here.count("manifest_restores") == 1
    assert here.count("hit_tokens") == 0
    here.ask()
    assert here.count("hit_tokens") > 0
    assert here.count("header_mismatches") == 0


@pytest.mark.parametrize(
    "loss",
    [
        "file cut off",
        pytest.param("file emptied", marks=SOAK),
        pytest.param("directory removed", marks=SOAK),
    ],
)
def test_a_device_that_lost_its_data(bench: StartBench, loss: str, log: list[str]) -> None:
    here, _ = filled(bench)
    here.engine.close()
    data = Path(here.paths[3], "rank0.data")
    if loss == "file cut off":
        subprocess.run(["truncate", "--size", "2M", data], check=True)
    elif loss == "file emptied":
        subprocess.run(["truncate", "--size", "0", data], check=True)
    else:
        shutil.rmtree(here.paths[3])
    here.start()
    here.ask()
    if loss == "file cut off":
        assert here.count("header_mismatches") > 0
    else:
        assert here.count("device_lost", device=here.paths[3]) == 1
        assert any(f"{data} is missing or empty" in line for line in log)
        assert here.count("header_mismatches") == 0
        assert here.count("hit_tokens") > 0
    here.restart()
    here.ask()
    assert [here.count(name) for name in QUIET] == [0] * len(QUIET)
    assert here.count("device_lost", device=here.paths[3]) == 0
    here.assert_clean()


def test_one_rank_alone_reads_wrong_bytes(
    models: dict[str, Path],
    stock: Stock,
    devices: Callable[..., list[dict[str, str]]],
    tmp_path: Path,
) -> None:
    """The other rank notices nothing, and must not keep what it computed with the first."""
    wanted = [answer.tokens for answer in stock.answers("llama", PROMPTS)]
    # Each has room for a whole request: the other is given up for what it returns.
    places = devices(2, "32MiB")
    with Engine(
        models["llama"],
        ssdkv=engine_options("page", places, tmp_path / "faults.json") | {"dram_gib": "14MiB"},
        kv_tokens=2 * kv_tokens(WINDOW, CHUNK),
        max_num_batched_tokens=CHUNK,
        max_model_len=4096,
        tensor_parallel_size=2,
        in_process=False,
    ) as engine:
        assert [a.tokens for a in engine.answers(PROMPTS)] == wanted
        # A bit of every 64 KiB: no slot of that rank on that device is as it was.
        data = Path(places[1]["path"], "rank1.data")
        for offset in range((1 << 20) + 20_000, data.stat().st_size, 1 << 16):
            flip_bit(data, offset)
        for _ in range(2):
            assert [a.tokens for a in engine.answers(PROMPTS)] == wanted
        assert engine.ssdkv("checksum_failures") + engine.ssdkv("header_mismatches") > 0
        assert engine.ssdkv("slots_pinned") == 0
