"""Traces: shapes, what is counted, files that are told from damaged ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.profiling.clusters.synthetic import trace
from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.profiling.clusters.trace import (
    MANIFEST,
    PAGE,
    WINDOW,
    Manifest,
    read_traces,
)


def saved(directory: Path) -> Manifest:
    one = trace()
    manifest = Manifest({"tokens": 2048}, {one.name: one.write(directory)})
    manifest.write(directory)
    return manifest


def test_mass_counts_neither_sinks_nor_window() -> None:
    one = trace()
    steps = one.decode_steps[:5]
    weights, mass = one.weights(1, 0, steps), one.mass(1, 0, steps)
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-5)
    assert (mass[:, :PAGE] == 0).all()
    for row, step in enumerate(steps.tolist()):
        position = int(one.position[step])
        assert (weights[row, position + 1 :] == 0).all()
        seen = min(one.context, position - WINDOW + 1)
        np.testing.assert_array_equal(mass[row, PAGE:seen], weights[row, PAGE:seen])
        assert (mass[row, seen:] == 0).all()


def test_weights_are_those_of_softmax() -> None:
    one = trace()
    step, layer, head = 130, 1, 1
    position = int(one.position[step])
    expected = np.zeros(position + 1)
    for query in one.query[layer, 2:4, step].astype(np.float64):
        logits = one.key[layer, head, : position + 1].astype(np.float64) @ query * one.scale
        expected += np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum() / 2
    found = one.weights(layer, head, np.array([step]))[0, : position + 1]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_shortened_keeps_queries_and_their_windows() -> None:
    one = trace()
    short = one.shortened(512)
    assert short.context == 512
    np.testing.assert_array_equal(short.keys(0, 1), one.keys(0, 1)[:512])
    np.testing.assert_array_equal(short.key[:, :, 512:], one.key[:, :, one.context :])


def test_files_come_back(tmp_path: Path) -> None:
    saved(tmp_path)
    manifest, (found,) = read_traces(tmp_path)
    assert manifest.settings == {"tokens": 2048}
    np.testing.assert_array_equal(found.query, trace().query)
    np.testing.assert_array_equal(found.key, trace().key)
    assert (found.context, found.decode) == (trace().context, trace().decode)


def test_damage_is_told(tmp_path: Path) -> None:
    saved(tmp_path)
    path = tmp_path / "made.npz"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(BenchError, match=r"made\.npz has another checksum"):
        read_traces(tmp_path)
    path.write_bytes(data[:-1])
    with pytest.raises(BenchError, match=r"made\.npz has \d+ bytes"):
        read_traces(tmp_path)
    path.unlink()
    with pytest.raises(BenchError, match=r"made\.npz cannot be read"):
        read_traces(tmp_path)


def test_a_changed_manifest_is_told(tmp_path: Path) -> None:
    saved(tmp_path)
    path = tmp_path / MANIFEST
    path.write_bytes(path.read_bytes().replace(b"2048", b"4096"))
    with pytest.raises(BenchError, match="is damaged"):
        read_traces(tmp_path)


def test_no_traces_name_the_way(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="ssdkv lab profile"):
        read_traces(tmp_path)
