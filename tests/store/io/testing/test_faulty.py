"""Every kind of injected fault, its counters, and the control file."""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.config.io_engine import EngineOptions, FaultKind, FaultRule
from vllm_ssdkv.store.io.engines.protocol import PENDING, Batch, IoEngine, Op
from vllm_ssdkv.store.io.testing.faults import FaultFile, RuleState, parse_rules

if TYPE_CHECKING:
    from tests.store.io.conftest import Rig, Submit

PAGE = 4096
PATIENCE_S = 60.0
DEVICE_BYTES = 64 * PAGE


def content(device: int) -> NDArray[np.uint8]:
    return np.random.default_rng(device).integers(0, 256, DEVICE_BYTES, dtype=np.uint8)


@pytest.fixture
def devices(rig: Rig) -> Rig:
    for device in range(2):
        rig.add_device(content(device).tobytes())
    rig.memory[:] = 0xEE
    return rig


def options(*rules: FaultRule, file: Path | None = None) -> EngineOptions:
    return EngineOptions(
        engine="threads", faults=rules, fault_file=None if file is None else str(file)
    )


def outcome(batch: Batch) -> list[int]:
    assert batch.wait(PATIENCE_S)
    return [int(result) for result in batch.results()]


def on_both(engine: IoEngine, submit: Submit, op: Op, pages: int = 1) -> list[int]:
    reads = [(device, 0, pages * PAGE, device * pages * PAGE) for device in range(2)]
    return outcome(submit(engine, op, *reads))


@pytest.mark.parametrize(
    ("kind", "code"),
    [("eio", errno.EIO), ("enospc", errno.ENOSPC), ("dead", errno.ENODEV)],
)
def test_errors_hit_their_device_and_move_nothing(
    devices: Rig, submit: Submit, kind: FaultKind, code: int
) -> None:
    engine = devices.open(options(FaultRule(kind=kind, device=0)))
    assert on_both(engine, submit, Op.READ) == [-code, PAGE]
    assert (devices.memory[:PAGE] == 0xEE).all()
    assert on_both(engine, submit, Op.WRITE) == [-code, PAGE]
    assert np.fromfile(devices.paths[0], np.uint8)[:PAGE].tolist() == content(0)[:PAGE].tolist()
    statistics = engine.statistics()
    assert statistics[f"fault_{kind}.0"] == 2
    assert f"fault_{kind}.1" not in statistics
    for direction in ("read", "write"):
        assert statistics[f"{direction}_submitted.0"] == 1
        assert statistics[f"{direction}_requests.0"] == 1
        assert statistics[f"{direction}_errors.0"] == 1
        assert statistics[f"{direction}_errors.1"] == 0
        assert statistics[f"{direction}_requests.1"] == 1


def test_a_rule_may_name_a_direction(devices: Rig, submit: Submit) -> None:
    engine = devices.open(options(FaultRule(kind="enospc", op="write")))
    assert on_both(engine, submit, Op.READ) == [PAGE, PAGE]
    assert on_both(engine, submit, Op.WRITE) == [-errno.ENOSPC] * 2


def test_after_and_count_bound_a_rule(devices: Rig, submit: Submit) -> None:
    engine = devices.open(options(FaultRule(kind="eio", device=1, after=3, count=2)))
    first = outcome(submit(engine, Op.READ, *[(1, 0, PAGE, i * PAGE) for i in range(4)]))
    second = outcome(submit(engine, Op.READ, *[(1, 0, PAGE, i * PAGE) for i in range(4)]))
    assert first == [PAGE, PAGE, PAGE, -errno.EIO]
    assert second == [-errno.EIO, PAGE, PAGE, PAGE]


def test_the_first_rule_that_hits_has_the_request(devices: Rig, submit: Submit) -> None:
    engine = devices.open(
        options(FaultRule(kind="eio", count=1), FaultRule(kind="enospc", count=1))
    )
    reads = [(0, 0, PAGE, i * PAGE) for i in range(3)]
    assert outcome(submit(engine, Op.READ, *reads)) == [-errno.EIO, -errno.ENOSPC, PAGE]


@given(
    batches=st.lists(st.integers(0, 9), max_size=8),
    after=st.integers(0, 6),
    count=st.one_of(st.none(), st.integers(1, 5)),
)
def test_how_requests_are_batched_does_not_matter(
    batches: list[int], after: int, count: int | None
) -> None:
    rule = FaultRule(kind="eio", after=after, count=count, probability=0.5, seed=11)
    one, many = RuleState(rule), RuleState(rule)
    hits = [hit for n in batches for hit in many.fire(n).tolist()]
    assert one.fire(sum(batches)).tolist() == hits
    assert sum(hits) <= (len(hits) if count is None else count)
    assert not any(hits[:after])


def test_a_probability_hits_about_its_share_and_repeats(devices: Rig, submit: Submit) -> None:
    rule = FaultRule(kind="eio", probability=0.25, seed=3)
    reads = [(0, 0, PAGE, 0)] * 400
    runs = [outcome(submit(devices.open(options(rule)), Op.READ, *reads)) for _ in range(2)]
    assert runs[0] == runs[1]
    assert 60 <= runs[0].count(-errno.EIO) <= 140


def test_short_moves_the_beginning_only(devices: Rig, submit: Submit) -> None:
    engine = devices.open(options(FaultRule(kind="short", device=0)))
    assert outcome(submit(engine, Op.READ, (0, 0, 5 * PAGE, 0), (0, 0, PAGE, 5 * PAGE))) == [
        2 * PAGE,
        0,
    ]
    np.testing.assert_array_equal(devices.memory[: 2 * PAGE], content(0)[: 2 * PAGE])
    assert (devices.memory[2 * PAGE :] == 0xEE).all()
    assert engine.statistics()["read_errors.0"] == 0
    assert engine.statistics()["read_requests.0"] == 2


def test_corrupt_changes_one_byte_of_a_read(devices: Rig, submit: Submit) -> None:
    engine = devices.open(options(FaultRule(kind="corrupt", device=0, count=1)))
    assert on_both(engine, submit, Op.WRITE, pages=2) == [2 * PAGE] * 2  # not a read
    devices.memory[:] = 0
    assert on_both(engine, submit, Op.READ, pages=2) == [2 * PAGE] * 2
    changed = np.flatnonzero(devices.memory[: 4 * PAGE] != 0xEE)
    assert len(changed) == 1
    assert changed[0] < 2 * PAGE
    assert on_both(engine, submit, Op.READ, pages=2) == [2 * PAGE] * 2
    assert (devices.memory[: 4 * PAGE] == 0xEE).all()


def test_corruption_is_the_same_for_the_same_seed(devices: Rig, submit: Submit) -> None:
    images = []
    for seed in (1, 1, 2):
        engine = devices.open(options(FaultRule(kind="corrupt", device=0, seed=seed)))
        assert on_both(engine, submit, Op.READ, pages=4) == [4 * PAGE] * 2
        images.append(devices.memory[: 4 * PAGE].tobytes())
    assert images[0] == images[1] != images[2]


def test_no_byte_changes_after_a_request_was_reported(devices: Rig, submit: Submit) -> None:
    """While another request of the batch hangs, the corrupt one must not be reported early."""
    engine = devices.open(
        options(FaultRule(kind="corrupt", device=0), FaultRule(kind="stall", device=1))
    )
    batch = submit(engine, Op.READ, (0, 0, PAGE, 0), (1, 0, PAGE, PAGE))
    assert not batch.wait(0.05)
    assert batch.results().tolist() == [PENDING, PENDING]


def test_latency_delays_each_request_it_hits(devices: Rig, submit: Submit) -> None:
    engine = devices.open(options(FaultRule(kind="latency", device=0, seconds=0.15)))
    begin = time.monotonic()
    slow = submit(engine, Op.READ, (0, 0, PAGE, 0))
    fast = submit(engine, Op.READ, (1, 0, PAGE, PAGE))
    assert outcome(fast) == [PAGE]
    assert not slow.done() or time.monotonic() - begin >= 0.15
    assert outcome(slow) == [PAGE]
    assert time.monotonic() - begin >= 0.15


def test_a_stall_holds_the_device_and_the_buffer(devices: Rig, submit: Submit) -> None:
    engine = devices.open(
        options(FaultRule(kind="stall", device=0, op="read", count=1, seconds=0.3))
    )
    begin = time.monotonic()
    read = submit(engine, Op.READ, (0, 0, PAGE, 0))
    write = submit(engine, Op.WRITE, (0, PAGE, PAGE, PAGE))  # not hit, but the same device
    assert outcome(submit(engine, Op.READ, (1, 0, PAGE, 2 * PAGE))) == [PAGE]
    while not read.done():
        untouched = bool((devices.memory[:PAGE] == 0xEE).all())
        # The bytes land late: never before the stall is over.
        assert untouched or time.monotonic() - begin >= 0.3
        assert time.monotonic() - begin < PATIENCE_S
    assert time.monotonic() - begin >= 0.3
    assert outcome(read) + outcome(write) == [PAGE, PAGE]
    np.testing.assert_array_equal(devices.memory[:PAGE], content(0)[:PAGE])
    assert outcome(submit(engine, Op.READ, (0, 0, PAGE, 0))) == [PAGE]  # used up


def test_close_waits_for_a_stall_that_ends(devices: Rig, submit: Submit) -> None:
    engine = devices.open(options(FaultRule(kind="stall", seconds=0.1)))
    batch = submit(engine, Op.READ, (0, 0, PAGE, 0))
    assert engine.close(PATIENCE_S)
    assert outcome(batch) == [PAGE]


def test_close_gives_up_on_a_stall_that_does_not_end(devices: Rig, submit: Submit) -> None:
    engine = devices.open(options(FaultRule(kind="stall")))
    batch = submit(engine, Op.READ, (0, 0, PAGE, 0))
    assert not engine.close(0.05)
    assert not engine.close(0.0)
    assert batch.results().tolist() == [PENDING]
    assert (devices.memory[:PAGE] == 0xEE).all()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "faults.json"


def write(file: Path, *rules: dict[str, Any]) -> None:
    replace(file, json.dumps(rules))


def replace(file: Path, text: str) -> None:
    # A new inode, because two writes within a clock tick may leave the same time and size.
    fresh = file.with_suffix(".new")
    fresh.write_text(text)
    fresh.rename(file)


def test_a_running_engine_follows_the_file(devices: Rig, submit: Submit, file: Path) -> None:
    engine = devices.open(options(FaultRule(kind="enospc", op="write", device=1), file=file))
    assert on_both(engine, submit, Op.READ) == [PAGE, PAGE]
    write(file, {"kind": "eio", "device": 0})
    assert on_both(engine, submit, Op.READ) == [-errno.EIO, PAGE]
    write(file, {"kind": "dead", "device": 1})
    assert on_both(engine, submit, Op.READ) == [PAGE, -errno.ENODEV]
    file.unlink()
    assert on_both(engine, submit, Op.READ) == [PAGE, PAGE]
    assert on_both(engine, submit, Op.WRITE) == [PAGE, -errno.ENOSPC]  # options stay
    assert engine.statistics()["fault_file_reloads"] == 3


def test_a_rule_that_stays_keeps_its_count(devices: Rig, submit: Submit, file: Path) -> None:
    once = {"kind": "eio", "device": 0, "count": 1}
    write(file, once)
    engine = devices.open(options(file=file))
    assert on_both(engine, submit, Op.READ) == [-errno.EIO, PAGE]
    write(file, once, {"kind": "eio", "device": 1})
    assert on_both(engine, submit, Op.READ) == [PAGE, -errno.EIO]


def test_taking_a_stall_away_frees_the_device(devices: Rig, submit: Submit, file: Path) -> None:
    write(file, {"kind": "stall", "device": 0})
    engine = devices.open(options(file=file))
    batch = submit(engine, Op.READ, (0, 0, PAGE, 0))
    assert not batch.wait(0.05)
    assert (devices.memory[:PAGE] == 0xEE).all()
    file.unlink()
    assert outcome(batch) == [PAGE]
    np.testing.assert_array_equal(devices.memory[:PAGE], content(0)[:PAGE])


MALFORMED = {
    "not JSON": ("[{", "not JSON"),
    "not a list": ('{"kind": "eio"}', "not a list"),
    "not an object": ("[1]", "not an object"),
    "no kind": ("[{}]", "not an object with a kind"),
    "misspelt": ('[{"kind": "eio", "devcie": 1}]', "did you mean device"),
    "unknown kind": ('[{"kind": "fire"}]', "one of eio"),
    "no such device": ('[{"kind": "eio", "device": 2}]', "device 2 of 2"),
    "a text for a number": ('[{"kind": "eio", "after": "1"}]', "after is '1'"),
}


@pytest.mark.parametrize(("text", "why"), MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_file_stops_the_start_and_is_ignored_later(
    devices: Rig,
    submit: Submit,
    file: Path,
    text: str,
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=why):
        devices.open(options(file=file))
    write(file, {"kind": "eio", "device": 0})
    engine = devices.open(options(file=file))
    assert on_both(engine, submit, Op.READ) == [-errno.EIO, PAGE]
    replace(file, text)
    with caplog.at_level(logging.WARNING):
        assert on_both(engine, submit, Op.READ) == [-errno.EIO, PAGE]
        assert on_both(engine, submit, Op.READ) == [-errno.EIO, PAGE]
    assert engine.statistics()["fault_file_errors"] == 1  # not once per batch
    assert why.split(maxsplit=1)[0] in caplog.text


def test_a_file_in_a_missing_directory_is_refused(devices: Rig, file: Path) -> None:
    with pytest.raises(ConfigError, match="directory does not exist"):
        devices.open(options(file=file.parent / "nowhere" / "faults.json"))


def test_a_file_is_read_once_per_change(file: Path) -> None:
    write(file, {"kind": "eio"})
    watched = FaultFile(file)
    assert watched.changed()
    assert watched.read() == (FaultRule(kind="eio"),)
    assert not watched.changed()
    os.utime(file, ns=(1, 1))
    assert watched.changed()


BAD_RULES: dict[str, dict[str, Any]] = {
    "kind": {"kind": "slow"},
    "op": {"kind": "eio", "op": "erase"},
    "device": {"kind": "eio", "device": -1},
    "device type": {"kind": "eio", "device": True},
    "after": {"kind": "eio", "after": -1},
    "count": {"kind": "eio", "count": 0},
    "probability": {"kind": "eio", "probability": 0},
    "probability above one": {"kind": "eio", "probability": 1.5},
    "seconds": {"kind": "stall", "seconds": float("nan")},
    "latency without seconds": {"kind": "latency"},
    "corrupt writes": {"kind": "corrupt", "op": "write"},
    "half dead": {"kind": "dead", "probability": 0.5},
    "dead in one direction": {"kind": "dead", "op": "read"},
}


@pytest.mark.parametrize("fields", BAD_RULES.values(), ids=BAD_RULES.keys())
def test_a_rule_without_meaning_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="fault rule"):
        FaultRule(**fields)


def test_every_field_has_a_place_in_the_file() -> None:
    text = (
        b'[{"kind": "stall", "device": 1, "op": "read", "after": 2, "count": 3, '
        b'"probability": 0.5, "seconds": 1.5, "seed": 4}, {"kind": "eio", "device": null}]'
    )
    assert parse_rules(text) == (
        FaultRule(
            kind="stall",
            device=1,
            op="read",
            after=2,
            count=3,
            probability=0.5,
            seconds=1.5,
            seed=4,
        ),
        FaultRule(kind="eio"),
    )
