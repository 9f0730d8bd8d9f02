"""Descriptions: every figure has a source, and what is wrong is named by file and field."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.offload.testing.drive_timing import DRIVES
from vllm_ssdkv.profiling.simulation.description import DATA, read_descriptions
from vllm_ssdkv.profiling.simulation.hardware import (
    KINDS,
    Drive,
    Flash,
    Gpu,
    NearStorage,
    described,
    find,
)

GPU = """
mine:
  memory_bytes: {value: 48.0e+9, source: "data sheet"}
  bandwidth: {value: 768.0e+9, source: "data sheet"}
  flops: {value: 155.0e+12, source: "fitted to P9", calibrated: [P9]}
"""


def test_everything_that_the_package_describes_has_sources() -> None:
    assert {f"{kind.kind}.yaml" for kind in KINDS} | {
        *("models.yaml", "node_protocol.json", "swarm_traces.json")
    } == {path.name for path in DATA.iterdir()}
    for kind in KINDS:
        found = described(kind)
        assert found
        for name, one in found.items():
            figures = {
                field
                for field in kind.model_fields
                if field not in ("name", "sources", "calibrated")
                and getattr(one, field) is not None
            }
            assert figures == set(one.sources), name
            assert one.calibrated.keys() <= figures


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "gpus.yaml"
    path.write_text(GPU)
    gpu = read_descriptions(Gpu, path)["mine"]
    assert (gpu.memory_bytes, gpu.price_usd) == (48e9, None)
    assert gpu.sources["flops"] == "fitted to P9"
    assert gpu.calibrated == {"flops": ("P9",)}
    with pytest.raises(ValidationError, match="frozen"):
        gpu.flops = 1.0
    faster = gpu.with_figures(bandwidth=1e12)
    assert faster.bandwidth == 1e12
    assert faster.sources["bandwidth"] == "given by the caller"
    with pytest.raises(ConfigError, match="mine: bandwidth: got -1"):
        gpu.with_figures(bandwidth=-1)


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ("768.0e+9", "-1", "mine: bandwidth: got -1; Input should be greater than 0"),
        ("768.0e+9", "much", "mine: bandwidth: got 'much'; Input should be a valid number"),
        ("768.0e+9", ".inf", "mine: bandwidth: got inf; Input should be a finite number"),
        ("bandwidth:", "bandwith:", "mine: bandwith: unknown field; remove it"),
        ("bandwidth:", "bandwith:", "mine: bandwidth: missing; give it a value and a source"),
        ('{value: 768.0e+9, source: "data sheet"}', "768.0e+9", "bandwidth: got 768000000000.0;"),
        (', source: "fitted to P9"', "", "mine: flops: source is missing"),
        ("value: 155.0e+12, ", "", "mine: flops: value is missing"),
        (
            "calibrated: [P9]",
            "calibrated: 3",
            "flops: calibrated: got 3; give a list of rows",
        ),
        ("calibrated: [P9]", "fitted: [P9]", "mine: flops: unknown 'fitted'; known here: value"),
        ("flops:", "sources:", "mine: sources: not a figure"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, before: str, after: str, text: str) -> None:
    path = tmp_path / "gpus.yaml"
    path.write_text(GPU.replace(before, after, 1))
    with pytest.raises(ConfigError) as caught:
        read_descriptions(Gpu, path)
    assert str(caught.value).startswith(f"{path}: ")
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a: [", "is no YAML"),
        ("- a", "give an object of names and descriptions"),
        ("a: 3", "a: got 3; give an object"),
    ],
)
def test_files_that_describe_nothing(tmp_path: Path, content: str, text: str) -> None:
    path = tmp_path / "gpus.yaml"
    with pytest.raises(ConfigError, match="cannot read"):
        read_descriptions(Gpu, path)
    path.write_text(content)
    with pytest.raises(ConfigError, match=text):
        read_descriptions(Gpu, path)


def test_names_that_are_not_described() -> None:
    with pytest.raises(ConfigError, match="gpus: 'a7000' is not described; known: a6000, "):
        find(Gpu, "a7000")


def test_drives_that_attend_have_the_products_timing() -> None:
    found = described(NearStorage)
    assert {one.timing for one in found.values()} == set(DRIVES)
    for one in found.values():
        assert one.drive.read_bandwidth == pytest.approx(DRIVES[one.timing].read_bandwidth)


def test_flash_makes_a_drive_as_fast_as_its_slowest_part() -> None:
    flash = find(Flash, "970pro-class")
    drive = flash.as_drive("ssd")
    assert isinstance(drive, Drive)
    assert drive.read_bandwidth == flash.link_bandwidth
    slow = flash.with_figures(read_s=flash.read_s * 10).as_drive("slow")
    transfer = flash.page_bytes / flash.channel_bandwidth
    dies = flash.channels * flash.dies
    wanted = dies / (10 * flash.read_s + transfer) * flash.page_bytes
    assert slow.read_bandwidth == pytest.approx(wanted)
    assert slow.write_bandwidth < flash.link_bandwidth
    assert slow.latency_s > drive.latency_s
