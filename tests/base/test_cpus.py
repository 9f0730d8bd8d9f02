"""CPUs beside those that a thread is bound to."""

from __future__ import annotations

import os
from pathlib import Path

from vllm_ssdkv.base.host import nearby_cpus


def test_they_are_those_of_the_same_node(tmp_path: Path) -> None:
    for node, cpus in enumerate(("0-3,8-11", "4-7,12-15", "")):  # the last has memory only
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{cpus}\n")
    assert nearby_cpus({5}, tmp_path) == {4, 5, 6, 7, 12, 13, 14, 15}
    assert nearby_cpus({0, 11}, tmp_path) == {0, 1, 2, 3, 8, 9, 10, 11}
    every = set(range(os.cpu_count() or 1))
    assert nearby_cpus({3, 4}, tmp_path) == every
    assert nearby_cpus({0}, tmp_path / "none") == every
