"""Loads of stored blocks: software of others, and nodes."""

from __future__ import annotations

import pytest

from tests.profiling.simulation.test_decode import drive
from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.profiling.simulation.hardware import Gpu, Machine, find, node_costs
from vllm_ssdkv.profiling.simulation.load import load_s
from vllm_ssdkv.profiling.simulation.storage import Storage

BLOCK = 1 << 20
MACHINE = Machine(find(Gpu, "a6000"), 16e9, 28e9, 4)
STORAGE = Storage.alike(drive(), 4)


def test_paths_of_others_load_slower_than_a_good_one() -> None:
    seconds = {
        path: load_s(MACHINE, STORAGE, 8e9, BLOCK, path=path)
        for path in (None, "lmcache", "vllm-fs")
    }
    assert seconds[None] < min(seconds["lmcache"], seconds["vllm-fs"])
    # All of it is in DRAM before it goes on: a stage after the other.
    assert seconds["lmcache"] > 8e9 / 27.6e9 + 8e9 / 16e9
    assert seconds[None] == pytest.approx(8e9 / 16e9, rel=0.01)
    with pytest.raises(ConfigError, match="paths: 'nfs' is not described"):
        load_s(MACHINE, STORAGE, 8e9, BLOCK, path="nfs")


def test_a_node_costs_what_was_measured_beside_the_drives() -> None:
    nbytes, latency = 64 << 20, 1e-3
    seconds = {
        node: load_s(MACHINE, STORAGE, nbytes, BLOCK, node=node) for node in (None, "unix", "tcp")
    }
    for socket in ("unix", "tcp"):
        costs = node_costs(socket)
        assert 0 < costs.attend < latency
        expected = costs.load + 64 * costs.block + nbytes * costs.byte
        assert seconds[socket] - seconds[None] == pytest.approx(expected)
    assert seconds["tcp"] > seconds["unix"] >= seconds[None]
    with pytest.raises(ConfigError, match="node: got 'tls'; measured are tcp, unix"):
        load_s(MACHINE, STORAGE, nbytes, BLOCK, node="tls")
