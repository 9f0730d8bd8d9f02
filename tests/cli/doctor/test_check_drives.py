"""Drives that a path lies on, in a sysfs made for the test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vllm_ssdkv.cli.doctor.check_drives import Drive, drives, drives_of
from vllm_ssdkv.cli.doctor.check_result import Level


class Sysfs:
    """Block devices as the kernel lists them."""

    def __init__(self, root: Path):
        self.root = root
        self.numbers = root / "dev"
        self.numbers.mkdir()

    def drive(self, name: str, model: str = "", rotational: bool = False) -> Path:
        node = self.root / "devices" / name
        (node / "queue").mkdir(parents=True)
        (node / "queue" / "rotational").write_text(f"{rotational:d}\n")
        if model:
            (node / "device").mkdir()
            (node / "device" / "model").write_text(f"{model}   \n")
        return node

    def partition(self, drive: Path) -> Path:
        node = drive / f"{drive.name}p1"
        node.mkdir()
        (node / "partition").write_text("1\n")
        return node

    def holds(self, node: Path, path: Path) -> None:
        """This block device holds the file system of a path."""
        device = os.stat(path).st_dev
        (self.numbers / f"{os.major(device)}:{os.minor(device)}").symlink_to(node)


@pytest.fixture
def sysfs(tmp_path: Path) -> Sysfs:
    return Sysfs(tmp_path)


def test_a_partition_is_on_its_drive(sysfs: Sysfs, tmp_path: Path) -> None:
    sysfs.holds(sysfs.partition(sysfs.drive("nvme0n1", "Fast SSD 2TB")), tmp_path)
    found = drives_of(tmp_path / "not" / "yet", block_devices=sysfs.numbers)
    assert found == [Drive("nvme0n1", "Fast SSD 2TB", rotational=False)]
    (finding,) = drives("d: drive", found)
    assert (finding.level, finding.text) == (Level.OK, "Fast SSD 2TB (nvme0n1)")


def test_raid_and_crypt_are_the_drives_below(sysfs: Sysfs, tmp_path: Path) -> None:
    disks = [sysfs.drive("nvme0n1", "A"), sysfs.drive("nvme1n1", "B", rotational=True)]
    raid, crypt = sysfs.drive("md0"), sysfs.drive("dm-0")
    (raid / "slaves").mkdir()
    (crypt / "slaves").mkdir()
    (crypt / "slaves" / "md0").symlink_to(raid)
    for disk in disks:
        (raid / "slaves" / f"{disk.name}p1").symlink_to(sysfs.partition(disk))
    (raid / "slaves" / "again").symlink_to(disks[0])
    sysfs.holds(crypt, tmp_path)
    found = drives_of(tmp_path, block_devices=sysfs.numbers)
    assert {drive.name for drive in found} == {"nvme0n1", "nvme1n1"}
    assert len(found) == 2
    (finding,) = drives("d: drive", found)
    assert finding.level is Level.WARN
    assert finding.text.endswith("spinning")
    assert finding.cure


def test_a_virtual_drive_may_say_that_it_spins(sysfs: Sysfs, tmp_path: Path) -> None:
    sysfs.holds(sysfs.drive("vda", rotational=True), tmp_path)
    (finding,) = drives("d: drive", drives_of(tmp_path, block_devices=sysfs.numbers))
    assert finding.level is Level.OK
    assert "without a model" in finding.text
    assert "(vda)" in finding.text


def test_where_the_path_has_no_number_its_source_has(sysfs: Sysfs, tmp_path: Path) -> None:
    """The path's own device is not listed, as with btrfs; that of the source is."""
    sysfs.holds(sysfs.drive("sda", "S"), Path("/proc"))
    assert drives_of(tmp_path, "/proc", sysfs.numbers) == [Drive("sda", "S", rotational=False)]
    assert drives_of(tmp_path, "overlay", sysfs.numbers) == []
    assert drives("d: drive", []) == []
