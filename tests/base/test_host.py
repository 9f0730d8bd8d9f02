"""Memory limits of containers, read from made-up control groups of both versions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from vllm_ssdkv.base import host
from vllm_ssdkv.base.sizes import GIB
from vllm_ssdkv.config.engine import SSDKVConfig

UNLIMITED_V1 = 9223372036854771712
"""The limit that version 1 shows where there is none."""


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with 900 GiB available, whose control groups lie below ``tmp_path / "cgroup"``."""
    (tmp_path / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {900 * GIB // 1024} kB\n")
    monkeypatch.setattr(host, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host, "CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(host, "GROUPS", tmp_path / "groups")


def member_of(tmp_path: Path, *lines: str) -> None:
    (tmp_path / "groups").write_text("".join(f"{line}\n" for line in lines))


def group(
    path: Path, limit: object, used: int, cache: Mapping[str, int], *, first: bool = False
) -> None:
    """Write a group's files as version 1 (``first``) or version 2 has them."""
    path.mkdir(parents=True, exist_ok=True)
    names = ("limit_in_bytes", "usage_in_bytes") if first else ("max", "current")
    for name, value in zip(names, (limit, used), strict=True):
        (path / f"memory.{name}").write_text(f"{value}\n")
    stat = {"anon": used, "file": 7, **cache}
    (path / "memory.stat").write_text("".join(f"{k} {v}\n" for k, v in stat.items()))


def test_without_a_limit_the_memory_of_the_machine_counts(tmp_path: Path) -> None:
    assert host.available_memory() == 900 * GIB  # neither a list of groups nor any group
    member_of(tmp_path, "0::/")
    group(tmp_path / "cgroup", "max", 3 * GIB, {})
    assert host.available_memory() == 900 * GIB


def test_page_cache_that_the_kernel_takes_back_is_not_counted_as_used(tmp_path: Path) -> None:
    """A container that has just read a model is not full."""
    member_of(tmp_path, "0::/")
    cache = {"inactive_file": 9 * GIB, "active_file": 4 * GIB}
    group(tmp_path / "cgroup", 16 * GIB, 15 * GIB, cache)
    assert host.available_memory() == 14 * GIB
    made = SSDKVConfig.from_extra_config({})
    assert made.dram_bytes(1) == 14 * GIB // 10
    assert made.most_dram_bytes(1) == 7 * GIB


def test_a_group_that_is_full_has_nothing_left(tmp_path: Path) -> None:
    member_of(tmp_path, "0::/")
    group(tmp_path / "cgroup", 2 * GIB, 3 * GIB, {})
    assert host.available_memory() == 0


@pytest.mark.parametrize("limited", ["", "slice", "slice/pod", "slice/pod/box"])
def test_the_smallest_limit_among_all_ancestors_counts(tmp_path: Path, limited: str) -> None:
    member_of(tmp_path, "0::/slice/pod/box")
    for name in ("", "slice", "slice/pod", "slice/pod/box"):
        limit = 8 * GIB if name == limited else 64 * GIB
        group(tmp_path / "cgroup" / name, limit, 2 * GIB, {})
    assert host.available_memory() == 6 * GIB


def test_the_limit_from_which_the_kernel_slows_a_group_counts(tmp_path: Path) -> None:
    member_of(tmp_path, "0::/box")
    group(tmp_path / "cgroup" / "box", "max", GIB, {})
    (tmp_path / "cgroup" / "box" / "memory.high").write_text(f"{4 * GIB}\n")
    assert host.available_memory() == 3 * GIB


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    """The list of groups has the host's names where the container has no namespace of them."""
    member_of(tmp_path, "0::/kubepods.slice/pod1/box/worker")
    group(tmp_path / "cgroup", 10 * GIB, GIB, {})
    group(tmp_path / "cgroup" / "worker", 5 * GIB, GIB, {})
    assert host.available_memory() == 4 * GIB
    member_of(tmp_path, "0::/../other")
    assert host.available_memory() == 9 * GIB


def test_version_1_has_limits_too(tmp_path: Path) -> None:
    member_of(tmp_path, "5:cpu,cpuacct:/tight", "4:hugetlb,memory:/docker/box", "0::/")
    root = tmp_path / "cgroup" / "memory"
    cache = {"inactive_file": 1, "total_inactive_file": GIB, "total_active_file": GIB}
    group(root, UNLIMITED_V1, 90 * GIB, {}, first=True)
    group(root / "docker", UNLIMITED_V1, 9 * GIB, {}, first=True)
    group(root / "docker" / "box", 4 * GIB, 3 * GIB, cache, first=True)
    group(root / "tight", 0, 0, {}, first=True)
    assert host.available_memory() == 3 * GIB


def test_both_versions_on_one_machine_are_looked_at(tmp_path: Path) -> None:
    member_of(tmp_path, "4:memory:/box", "0::/box")
    group(tmp_path / "cgroup" / "memory" / "box", 6 * GIB, GIB, {}, first=True)
    group(tmp_path / "cgroup" / "box", 4 * GIB, GIB, {})
    assert host.available_memory() == 3 * GIB
