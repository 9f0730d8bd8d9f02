"""Opening a store: what is made, what is kept, what is refused, and that both roles agree."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.store.conftest import PAGED, PAGED_ENCRYPTED, array, key_of
from tests.store.opening import (
    CAPACITY,
    MODEL,
    Opened,
    close,
    fill,
    found,
    impatient,
    place,
    used,
)
from vllm_ssdkv.base.errors import (
    ConfigError,
    DeviceError,
    EngineUnavailableError,
    FingerprintMismatchError,
    FormatError,
    KeyMismatchError,
    StoreError,
    StoreLockedError,
)
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.store import open as opening
from vllm_ssdkv.store.format.fingerprint import Fingerprint
from vllm_ssdkv.store.format.journal_record import HEADER_BYTES, RECORD_BYTES
from vllm_ssdkv.store.format.manifest import COPY, NAME, Manifest
from vllm_ssdkv.store.format.slot_header_batch import key_rows
from vllm_ssdkv.store.integrity.store_key import StoreKey
from vllm_ssdkv.store.io.engines.protocol import Op
from vllm_ssdkv.store.open import JOURNAL, StorePlace, open_index, open_rank

pytestmark = pytest.mark.usefixtures("small_segments")


def test_a_new_store_fits_its_capacity(
    tmp_devices: Callable[[int], list[Path]], opened: Opened
) -> None:
    devices = tmp_devices(3)
    where = place(devices)
    store = opened(where)
    index, rebalancer = open_index(where)
    placement = rebalancer.placement
    assert index.num_slots == store.num_slots == placement.slots > 60
    assert index.gauges()["free"] == index.num_slots
    assert placement.devices == 3
    assert max(used(devices)) <= CAPACITY
    # No device has room for one slot more.
    sizes = [placement.device_bytes(d) + 2 * PAGED.slot_bytes for d in range(3)]
    assert max(sizes) + (CAPACITY - min(used(devices))) > CAPACITY
    assert (devices[0] / JOURNAL).exists()
    assert stat.S_IMODE((devices[0] / NAME).stat().st_mode) == 0o600
    text = "\n".join(store.describe())
    assert str(devices[2]) in text
    assert f"{index.num_slots} blocks" in text
    index.close()


@pytest.mark.parametrize("first", ["rank", "index"])
def test_both_roles_agree_whoever_comes_first(
    tmp_devices: Callable[[int], list[Path]], opened: Opened, first: str
) -> None:
    devices = tmp_devices(2)
    where = [place(devices, tp_size=2) for _ in range(3)]
    if first == "index":
        index, _ = open_index(where[0])
    ranks = [opened(where[1 + r], r) for r in range(2)]
    if first == "rank":
        index, _ = open_index(where[0])
    assert {store.num_slots for store in ranks} == {index.num_slots}
    assert all((d / f"rank{r}.data").exists() for d in devices for r in range(2))
    assert max(used(devices)) <= CAPACITY
    manifest = Manifest.load(devices[0])
    assert manifest is not None
    assert all(file for device in manifest.devices for file in device.files)
    assert manifest.opened == 1
    index.close()


def test_slots_are_found_again_with_growing_epochs(
    tmp_devices: Callable[[int], list[Path]], opened: Opened
) -> None:
    devices = tmp_devices(2)
    close(opened(place(devices)))
    index, _ = open_index(place(devices))
    keys = fill(index, 7)
    newest = max(index.epoch(slot) for slot in keys)
    index.close()
    close(opened(place(devices)))
    index, _ = open_index(place(devices))
    assert found(index, keys) == set(keys)
    assert index.epoch(int(index.allocate(1)[0])) > newest
    index.close()


def test_a_lost_device_loses_what_touched_it(
    tmp_devices: Callable[[int], list[Path]], opened: Opened
) -> None:
    devices = tmp_devices(3)
    close(opened(place(devices)))
    index, rebalancer = open_index(place(devices))
    placement = rebalancer.placement
    keys = fill(index, 12)
    index.close()
    shutil.rmtree(devices[1])
    counters = Counters()
    close(opened(place(devices), counters=counters))
    assert counters.total("device_lost", device=str(devices[1])) == 1
    assert counters.total("device_lost", device=str(devices[0])) == 0
    index, _ = open_index(place(devices))
    touched = {s for s in keys if placement.touches(1, array([s]))[0]}
    assert 0 < len(touched) < len(keys)
    assert found(index, keys) == set(keys) - touched
    index.close()
    # Said once: a store opened again has lost nothing more.
    again = Counters()
    close(opened(place(devices), counters=again))
    assert again.total("device_lost", device=str(devices[1])) == 0
    index, _ = open_index(place(devices))
    assert found(index, keys) == set(keys) - touched
    index.close()


def test_a_device_lost_twice_before_the_scheduler_looked(
    tmp_devices: Callable[[int], list[Path]], opened: Opened
) -> None:
    """The worker was killed after it made the file anew, before the index was opened."""
    devices = tmp_devices(2)
    close(opened(place(devices)))
    index, _ = open_index(place(devices))
    keys = fill(index, 6)
    index.close()
    shutil.rmtree(devices[1])
    for _ in range(2):
        close(opened(place(devices)))
    index, rebalancer = open_index(place(devices))
    touches = rebalancer.placement.touches
    assert not any(touches(1, array([s]))[0] for s in found(index, keys))
    index.close()


def test_capacity_may_change(tmp_devices: Callable[[int], list[Path]], opened: Opened) -> None:
    devices = tmp_devices(2)
    plain = [{"path": d, "weight": 1} for d in devices]
    larger = [{"path": d, "capacity": 2 * CAPACITY, "weight": 1} for d in devices]
    close(opened(place(devices)))
    index, _ = open_index(place(devices))
    small, keys = index.num_slots, fill(index, index.num_slots)
    index.close()

    close(opened(place(devices, devices=larger)))
    index, _ = open_index(place(devices, devices=larger))
    assert index.num_slots > small
    assert found(index, keys) == set(keys)
    keys |= fill(index, index.num_slots - small)
    index.close()
    assert max(used(devices)) > CAPACITY

    # Without a number a store keeps the size it has.
    assert opened(place(devices, devices=plain)).num_slots > small


def test_a_lowered_capacity_gives_space_back(
    tmp_devices: Callable[[int], list[Path]], opened: Opened
) -> None:
    devices = tmp_devices(2)
    larger = [{"path": d, "capacity": 2 * CAPACITY, "weight": 1} for d in devices]
    close(opened(place(devices, devices=larger)))
    index, rebalancer = open_index(place(devices, devices=larger))
    before = {segment.first: segment.lanes for segment in rebalancer.placement.segments}
    keys = fill(index, index.num_slots)
    index.close()
    store = opened(place(devices))
    index, rebalancer = open_index(place(devices))
    assert index.num_slots == store.num_slots < len(keys)
    assert max(used(devices)) <= CAPACITY
    kept = {
        slot
        for segment in rebalancer.placement.segments
        if before.get(segment.first) == segment.lanes
        for slot in segment.all_slots().tolist()
    }
    assert found(index, keys) == kept
    assert len(kept) > 0.9 * index.num_slots
    assert index.counters["out_of_range"] == len(keys) - index.num_slots
    for device, path in enumerate(devices):
        size = (path / "rank0.data").stat().st_size
        assert size == rebalancer.placement.device_bytes(device)
    index.close()


def test_a_second_opening_is_refused_by_name(
    tmp_devices: Callable[[int], list[Path]], opened: Opened
) -> None:
    devices = tmp_devices(2)
    store = opened(place(devices))
    index, _ = open_index(place(devices))
    said = f"{devices[0]}.*in use by .*process"
    with impatient(), pytest.raises(StoreLockedError, match=said) as refused:
        open_rank(place(devices), 0, Counters())
    assert str(devices[0] / "rank0.data") in str(refused.value)
    said = f"{devices[0] / JOURNAL} is in use"
    with impatient(), pytest.raises(StoreLockedError, match=said):
        open_index(place(devices))
    close(store)
    index.close()
    close(opened(place(devices)))
    open_index(place(devices))[0].close()


def test_a_failed_opening_lets_go_of_everything(
    tmp_devices: Callable[[int], list[Path]], opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = tmp_devices(3)
    shutil.rmtree(devices[2])
    devices[2].write_text("not a directory")
    with pytest.raises(DeviceError, match=str(devices[2])):
        open_rank(place(devices), 0, Counters())
    devices[2].unlink()

    def refuse(*_: object, **__: object) -> None:
        raise EngineUnavailableError("of a test")

    with monkeypatch.context() as patch:
        patch.setattr(opening, "open_engine", refuse)
        with pytest.raises(EngineUnavailableError):
            open_rank(place(devices), 0, Counters())
    assert opened(place(devices)).num_slots > 0


def test_other_options_for_the_same_directories_are_refused(
    tmp_devices: Callable[[int], list[Path]], opened: Opened
) -> None:
    devices = tmp_devices(2)
    close(opened(place(devices)))
    other = Fingerprint({"model": "huge"})
    with pytest.raises(FingerprintMismatchError, match="model: 'tiny' != 'huge'"):
        open_rank(place(devices, fingerprint=other), 0, Counters())
    assert opened(place(devices)).num_slots > 0


def test_without_its_manifest_a_store_is_refused_untouched(
    tmp_devices: Callable[[int], list[Path]],
) -> None:
    devices = tmp_devices(2)
    close(open_rank(place(devices), 0, Counters()))
    (devices[0] / NAME).unlink()
    before = (devices[1] / "rank0.data").read_bytes()
    with pytest.raises(FormatError, match="its copy is there: `ssdkv fsck --repair"):
        open_rank(place(devices, recover="strict"), 0, Counters())
    assert not (devices[0] / NAME).exists()
    (devices[0] / COPY).unlink()
    with pytest.raises(FormatError, match=r"belongs to another store.* delete it"):
        open_rank(place(devices), 0, Counters())
    assert (devices[1] / "rank0.data").read_bytes() == before
    for device in devices:
        (device / "rank0.data").unlink(missing_ok=True)
    close(open_rank(place(devices), 0, Counters()))


def test_a_flipped_byte_in_the_manifest_is_refused(
    tmp_devices: Callable[[int], list[Path]],
) -> None:
    devices = tmp_devices(2)
    close(open_rank(place(devices), 0, Counters()))
    path = devices[0] / NAME
    data = path.read_bytes()
    for position in range(0, len(data), 53):
        spoiled = bytearray(data)
        spoiled[position] ^= 1 << position % 7
        path.write_bytes(spoiled)
        with pytest.raises(FormatError, match=str(path)):
            open_rank(place(devices, recover="strict"), 0, Counters())
    path.write_bytes(data)
    close(open_rank(place(devices), 0, Counters()))


@pytest.mark.parametrize("first", ["rank", "index"])
@pytest.mark.parametrize("damage", ["changed", "cut", "missing"])
def test_a_damaged_manifest_is_restored_from_its_copy(
    tmp_devices: Callable[[int], list[Path]],
    opened: Opened,
    caplog: pytest.LogCaptureFixture,
    first: str,
    damage: str,
) -> None:
    devices = tmp_devices(2)
    close(opened(place(devices)))
    index, _ = open_index(place(devices))
    keys = fill(index, 7)
    index.close()
    path = devices[0] / NAME
    whole = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        changed = whole.replace(b'"opened": 1', b'"opened": 7')
        path.write_bytes(whole[:99] if damage == "cut" else changed)
    where = place(devices)
    if first == "rank":
        close(opened(where))
    index, _ = open_index(where)
    assert found(index, keys) == set(keys)
    assert where.counters.total("manifest_restores") == 1
    assert sum(f"{path}" in m and "restored from its copy" in m for m in caplog.messages) == 1
    restored = Manifest.load(devices[0])
    assert restored is not None
    assert (restored.store, restored.opened) == (json.loads(whole)["store"], 2)
    index.close()


def test_what_a_start_does_with_a_damaged_journal(
    tmp_devices: Callable[[int], list[Path]], opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    devices = tmp_devices(2)
    opened(place(devices))
    index, _ = open_index(place(devices))
    keys = fill(index, 7)
    index.close()
    path = devices[0] / JOURNAL
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + RECORD_BYTES + 9] ^= 1
    path.write_bytes(data)
    for _ in range(2):
        with pytest.raises(FormatError, match=f'journal {path}: 1 of its 7 .*fsck.*"quiet"'):
            open_index(place(devices, recover="strict"))
    assert path.read_bytes() == data
    with caplog.at_level("INFO"):
        index, _ = open_index(place(devices))
    assert len(found(index, keys)) == 6
    assert index.counters["journal_corrupt_records"] == 1
    assert sum("6 stored blocks recovered" in m and "1 damaged" in m for m in caplog.messages) == 1
    index.close()
    index, _ = open_index(place(devices, recover="strict"))
    assert len(found(index, keys)) == 6
    before = index.epoch(int(index.allocate(1)[0]))
    index.close()
    index, _ = open_index(place(devices, recover="none"))
    assert index.gauges()["free"] == index.num_slots
    assert index.counters["journal_resets"] == 1
    assert index.epoch(int(index.allocate(1)[0])) > before
    index.close()


def test_the_manifest_says_what_there_is(tmp_devices: Callable[[int], list[Path]]) -> None:
    """Whoever looks at the store has no options and no model."""
    devices = tmp_devices(2)
    where = place(devices)
    where.model = "some/model"
    close(open_rank(where, 0, Counters()))
    before = int(time.time())
    index, _ = open_index(where)
    index.close()
    manifest = Manifest.load(devices[0])
    assert manifest is not None
    assert manifest.geometry == PAGED
    assert (manifest.slots, manifest.model) == (index.num_slots, "some/model")
    assert before <= manifest.last_opened <= time.time()
    assert Manifest.load_copy(devices[0]) == manifest


def test_no_room_for_a_block_is_said(tmp_devices: Callable[[int], list[Path]]) -> None:
    devices = tmp_devices(1)
    tiny = place(devices, tp_size=16)
    with pytest.raises(ConfigError, match=r"no room for a block of .* 16 rank\(s\)"):
        open_rank(tiny, 0, Counters())
    assert not list(devices[0].glob("*.data"))


def test_directories_that_nobody_named(
    tmp_devices: Callable[[int], list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (root,) = tmp_devices(1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(root))
    where = place([], devices=[])
    where.prepare()
    assert where.state.is_dir()
    assert root in where.state.parents
    replica = place([root / "ssd"], replica=3)
    replica.prepare()
    assert (root / "ssd" / "dp3").is_dir()
    assert replica.state == root / "ssd" / "dp3"


def test_what_is_not_mounted_is_not_made(tmp_devices: Callable[[int], list[Path]]) -> None:
    (root,) = tmp_devices(1)
    absent = root / "mnt" / "ssd"
    with pytest.raises(ConfigError, match=f"state_dir {absent}: neither it nor its parent"):
        open_rank(place([absent]), 0, Counters())
    with pytest.raises(DeviceError, match=r"ssd\) does not exist, nor does .*/mnt: mount"):
        open_rank(place([root, absent]), 0, Counters())
    assert not absent.parent.exists()
    (root / "file").write_text("")
    with pytest.raises(StoreError, match=f"cannot make the directory {root / 'file'}"):
        open_rank(place([root / "file"]), 0, Counters())


def test_ranks_do_not_share_bytes(tmp_devices: Callable[[int], list[Path]], opened: Opened) -> None:
    devices = tmp_devices(2)
    ranks = [opened(place(devices, tp_size=2), r) for r in range(2)]
    for rank, store in enumerate(ranks):
        size = PAGED.slot_bytes
        store.arena.view(0, size)[:] = 0x40 + rank
        buffer = np.zeros(1, dtype=np.uint64)
        assert store.files.submit(Op.WRITE, array([5]), 0, size, buffer).wait().all()
    for rank, store in enumerate(ranks):
        store.arena.view(0, PAGED.slot_bytes)[:] = 0
        buffer = np.zeros(1, dtype=np.uint64)
        assert store.files.submit(Op.READ, array([5]), 0, size, buffer).wait().all()
        assert (store.arena.view(0, PAGED.slot_bytes) == 0x40 + rank).all()
    assert os.fstat(ranks[0].devices[0].fd).st_ino != os.fstat(ranks[1].devices[0].fd).st_ino


# ---- encrypted stores ----


def key_file(path: Path, secret: bytes) -> dict[str, str]:
    path.write_text(secret.hex())
    path.chmod(0o600)
    return {"key_file": str(path)}


def test_an_encrypted_store_opens_with_its_key_only(
    tmp_devices: Callable[[int], list[Path]],
    tmp_path: Path,
    opened: Opened,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    devices, secret = tmp_devices(2), bytes(range(180, 212))
    mine = key_file(tmp_path / "mine", secret)
    other = key_file(tmp_path / "other", secret[::-1])
    where = place(devices, encryption=mine)
    store = opened(where)
    index, _ = open_index(where)
    keys = fill(index, 9)
    index.close()
    summary = "\n".join(store.describe())
    assert "encryption AES-256-GCM (OpenSSL 3" in summary
    assert f"key id {StoreKey(secret).key_id.hex()}" in summary
    close(store)
    before = {p: p.read_bytes() for d in devices for p in sorted(d.iterdir())}
    for options, text in (
        ({}, "is encrypted with the key .*, the options give no key"),
        ({"encryption": other}, "is encrypted with the key .*, the options give the key"),
    ):
        for open_one in (lambda p: open_rank(p, 0, Counters()), open_index):
            with pytest.raises(KeyMismatchError, match=text):
                open_one(place(devices, **options))
    assert {p: p.read_bytes() for d in devices for p in sorted(d.iterdir())} == before
    where = place(devices, encryption=mine)
    assert opened(where).key_id == StoreKey(secret).key_id
    index, _ = open_index(where)
    assert found(index, keys) == set(keys)
    index.close()
    shown = summary + caplog.text + repr(where.config) + repr(where.key)
    for spelling in (secret.hex(), repr(secret)[2:-1]):
        assert spelling not in shown
    assert all(secret not in data and secret.hex().encode() not in data for data in before.values())


def test_a_plain_store_is_not_opened_with_a_key(
    tmp_devices: Callable[[int], list[Path]], tmp_path: Path
) -> None:
    devices = tmp_devices(2)
    store = open_rank(place(devices), 0, Counters())
    assert store.describe()[-1] == "encryption off"
    close(store)
    with pytest.raises(KeyMismatchError, match="is not encrypted, the options give the key"):
        open_rank(place(devices, encryption=key_file(tmp_path / "k", bytes(32))), 0, Counters())


def test_ranks_and_stores_have_keys_of_their_own(
    tmp_devices: Callable[[int], list[Path]], tmp_path: Path, opened: Opened
) -> None:
    """Found where it matters: one rank's slot is no slot of another, nor of another store."""
    option = key_file(tmp_path / "k", bytes(range(32)))
    first, second = (
        place(tmp_devices(1), encryption=option, tp_size=2, dram_gib="40MiB") for _ in range(2)
    )
    stores = [opened(first, 0), opened(first, 1), opened(second, 0)]
    size = PAGED_ENCRYPTED.slot_bytes
    images = []
    block = (np.array([3]), np.array([4]), key_rows([key_of(1)]))
    for store in stores:
        at = np.array([store.plan.image_offset + size], dtype=np.uint64)
        frame = np.array([store.plan.frame_offset], dtype=np.uint64)
        store.files.codec.seal(*block, frame, at)
        images.append(store.arena.view(int(at[0]), size).copy())
    for i, store in enumerate(stores):
        for j, image in enumerate(images):
            at = np.array([store.plan.image_offset], dtype=np.uint64)
            store.arena.view(int(at[0]), size)[:] = image
            _, right = store.files.codec.read_headers(*block, at)
            assert right.tolist() == [i == j]
            why = store.files.codec.why_refused(3, 4, key_of(1), int(at[0]))
            assert i == j or re.match(r"slot header: (rank|tag) is", why)
    assert first.name_key() != second.name_key()


def test_a_key_that_cannot_be_had_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"encryption.key_file .*: No such file"):
        place([tmp_path], encryption={"key_file": str(tmp_path / "none")})


def test_the_geometry_must_be_that_of_the_options(tmp_path: Path) -> None:
    option = key_file(tmp_path / "k", bytes(range(32)))
    config = SSDKVConfig.from_extra_config({"devices": [tmp_path], "encryption": option})
    with pytest.raises(ValueError, match="encrypted slots: False"):
        StorePlace(config, [PAGED], MODEL)
