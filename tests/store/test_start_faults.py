"""Faults that keep a store from opening: docs have each message, and their cure works."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.store.opening import MODEL, close, fill, impatient, place
from vllm_ssdkv.base.errors import SSDKVError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.cli.explain.catalog import entry_for
from vllm_ssdkv.cli.main import app
from vllm_ssdkv.store.format.fingerprint import Fingerprint
from vllm_ssdkv.store.format.manifest import COPY, NAME
from vllm_ssdkv.store.open import JOURNAL, open_index, open_rank

pytestmark = pytest.mark.usefixtures("small_segments")

Options = dict[str, Any]


class Start:
    """A store of two devices that has been used, and the options that it is started with."""

    def __init__(self, devices: list[Path], apart: Path) -> None:
        self.devices = devices
        self.apart = apart
        """A directory for what is neither."""
        self.options: Options = {}
        self.fingerprint: Fingerprint = MODEL

    def run(self, keep: list[Callable[[], object]] | None = None) -> None:
        """Open it as an engine does, and close it again, or leave that to ``keep``."""
        where = place(self.devices, self.fingerprint, **self.options)
        store = open_rank(where, 0, Counters())
        ends: list[Callable[[], object]] = [lambda: close(store)]
        try:
            index, _ = open_index(where)
            ends.append(index.close)
            fill(index, 3)
        finally:
            if keep is None:
                for end in ends:
                    end()
            else:
                keep += ends

    def ssdkv(self, *arguments: str) -> None:
        """A command of the docs."""
        done = CliRunner().invoke(app, [*arguments, *map(str, self.devices)])
        assert done.exit_code in (0, 1), done.output


def damage(path: Path, offset: int = 0, length: int = 64) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\xa5" * length)


Cure = Callable[[], object]


def unknown_option(start: Start) -> Cure:
    start.options = {"dram_gb": 1}
    return start.options.clear


def not_mounted(start: Start) -> Cure:
    missing = start.apart / "mnt" / "ssd"
    start.devices.append(missing)
    return lambda: missing.mkdir(parents=True)


def a_file_in_its_place(start: Start) -> Cure:
    file = start.apart / "file"
    file.touch()
    start.devices.append(file)
    return file.unlink


def none_is_left(start: Start) -> Cure:
    start.options = {"state_dir": str(start.apart / "state")}
    start.devices = [start.apart / "mnt" / name for name in "ab"]
    for device in start.devices:
        device.mkdir(parents=True)
    start.run()
    shutil.rmtree(start.apart / "mnt")
    return lambda: start.devices[1].mkdir(parents=True)


def too_full(start: Start) -> Cure:
    path = start.devices[0]
    start.options = {"devices": [{"path": str(path), "capacity": "1PiB", "weight": 1}]}
    return start.options.clear


def in_use(start: Start) -> Cure:
    running: list[Callable[[], object]] = []
    start.run(running)
    return lambda: [end() for end in running]


def of_another_model(start: Start) -> Cure:
    start.fingerprint = Fingerprint({"model": "another"})
    return lambda: start.ssdkv("rm", "--yes")


def key_of_a_plain_store(start: Start) -> Cure:
    key = start.apart / "key"
    key.write_bytes(bytes(range(200, 232)))
    key.chmod(0o600)
    start.options = {"encryption": {"key_file": str(key)}, "dram_gib": "40MiB"}
    return start.options.clear


def key_that_others_may_read(start: Start) -> Cure:
    key_of_a_plain_store(start)
    key = start.apart / "key"
    key.chmod(0o644)
    start.ssdkv("rm", "--yes")
    return lambda: key.chmod(0o600)


def manifest(start: Start) -> Cure:
    start.options = {"recover": "strict"}
    damage(start.devices[0] / NAME)
    return lambda: start.ssdkv("fsck", "--repair")


def both_manifests(start: Start) -> Cure:
    manifest(start)
    damage(start.devices[0] / COPY)
    return start.options.clear


def both_superblocks(start: Start) -> Cure:
    file = start.devices[1] / "rank0.data"
    damage(file, length=1 << 20)
    return file.unlink


def torn_journal(start: Start) -> Cure:
    start.options = {"recover": "strict"}
    journal = start.devices[0] / JOURNAL
    damage(journal, journal.stat().st_size - 90, 9)
    return lambda: start.ssdkv("fsck", "--repair")


def journal_of_another_store(start: Start) -> Cure:
    start.options = {"recover": "strict"}
    damage(start.devices[0] / JOURNAL)
    return start.options.clear


def a_copy_beside_the_original(start: Start) -> Cure:
    copy = start.apart / "copy"
    shutil.copytree(start.devices[1], copy)
    start.devices.append(copy)
    return start.devices.pop


FAULTS = (
    unknown_option,
    not_mounted,
    a_file_in_its_place,
    none_is_left,
    too_full,
    in_use,
    of_another_model,
    key_of_a_plain_store,
    key_that_others_may_read,
    manifest,
    both_manifests,
    both_superblocks,
    torn_journal,
    journal_of_another_store,
    a_copy_beside_the_original,
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_from_the_message_to_the_cure(
    fault: Callable[[Start], Cure], tmp_devices: Callable[[int], list[Path]], tmp_path: Path
) -> None:
    start = Start(tmp_devices(2), tmp_path)
    start.run()
    cure = fault(start)
    patience = impatient() if fault is in_use else nullcontext()
    with patience, pytest.raises(SSDKVError) as refused:
        start.run()
    found = entry_for(str(refused.value))
    assert found is not None, str(refused.value)
    assert found.message.cure
    cure()
    start.run()
