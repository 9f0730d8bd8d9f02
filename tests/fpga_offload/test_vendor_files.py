"""Files for the vendor's tools: they hold every argument, and say that they were never run."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.fpga_offload.needs import needs_rtlsim
from vllm_ssdkv.fpga_offload.description import KERNELS, Kernel
from vllm_ssdkv.fpga_offload.rtlsim import build_folder
from vllm_ssdkv.fpga_offload.vendor_files import (
    PLATFORM,
    READ_PORTS,
    RTL_PORTS,
    connectivity,
    registers_tcl,
    rtl_top,
)

ROOT = Path(__file__).parent.parent.parent / "fpga_offload"
VENDOR = ROOT / "vendor"
SCRIPTS = sorted(VENDOR.glob("*.sh"))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: str(kernel.name))
def test_every_address_has_a_memory(kernel: Kernel) -> None:
    lines = connectivity().splitlines()
    assert f"nk={kernel.name}:1:{kernel.name}_1" in lines
    placed = [line for line in lines if line.startswith(f"sp={kernel.name}_1.")]
    addresses = [one.name for one in kernel.arguments if one.kind == "address"]
    assert [re.split(r"[.:]", line)[1] for line in placed] == addresses


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: str(kernel.name))
def test_every_register_is_told(kernel: Kernel) -> None:
    (body,) = re.findall(rf"proc {kernel.name}_registers .*?\n}}", registers_tcl(), re.DOTALL)
    names = re.findall(r"add_register (\w+) \$block", body)
    offsets = [int(text, 16) for text in re.findall(r"address_offset (\w+)", body)]
    assert names == ["CTRL", "GIER", "IP_IER", "IP_ISR", *(a.name for a in kernel.arguments)]
    assert offsets == [0, 4, 8, 12, *(register.offset for register in kernel.registers())]
    ports = re.findall(r"set_property value (\w+) \$parameter", body)
    addresses = [one for one in kernel.arguments if one.kind == "address"]
    assert ports == [RTL_PORTS[one.port] for one in addresses]


@pytest.mark.parametrize("name", READ_PORTS)
def test_the_top_connects_every_port_of_the_kernel(name: str) -> None:
    """Vitis names an AXI port by what it begins with; the kernel's own names are shorter."""
    kernel = (ROOT / "rtl" / f"{name}.sv").read_text().partition(");")[0]
    ports = re.findall(r"(input|output)\s+wire\s+(\[[^]]*\])?\s*(\w+)", kernel)
    assert len(ports) > 40
    top = rtl_top(name)
    outer = re.findall(r"(input|output)\s+wire\s+(\[[^]]*\])?\s*(\w+)", top)
    declared = {wire: (direction, width) for direction, width, wire in outer}
    connected = dict(re.findall(r"\.(\w+)\((\w+)\)", top.partition("kernel(")[2]))
    assert connected.pop("rst") == "rst"
    for direction, width, port in ports:
        if port == "rst":
            continue
        place, _, signal = port.partition("_")
        wanted = f"s_axi_control_{signal}" if place == "s" else f"m_axi_{place}_{signal}"
        wire = connected.pop(port)
        assert wire == {"clk": "ap_clk", "interrupt": "interrupt"}.get(port, wanted)
        assert declared[wire] == (direction, width), port
    assert connected == {}


@pytest.mark.soak
@needs_rtlsim(128, 1)
@pytest.mark.parametrize("name", READ_PORTS)
def test_the_top_elaborates(name: str) -> None:
    sources = [
        ROOT / "generated" / "ssdkv_fpga.svh",
        build_folder() / "zkf.v",
        *sorted((ROOT / "rtl").glob("*.sv")),
        ROOT / "generated" / f"{name}_top.sv",
    ]
    options = ["--lint-only", "-Wno-lint", "-Wno-fatal", "-GD=64", "-GG=1"]
    found = subprocess.run(
        ["verilator", *options, "--top-module", f"{name}_top", *map(str, sources)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert not re.search(rf"PIN\w*: .*{name}_top", found.stderr)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: str(kernel.name))
def test_every_memory_port_is_one_of_the_top(kernel: Kernel) -> None:
    used = {RTL_PORTS[one.port] for one in kernel.arguments if one.kind == "address"}
    masters = set(re.findall(r"(m_axi_[a-z]+)_\w+valid", rtl_top(kernel.name)))
    assert used == masters


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.name))
def test_scripts_say_what_is_missing(script: Path, tmp_path: Path) -> None:
    found = subprocess.run(
        ["/bin/bash", str(script), str(tmp_path / "out")],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert found.returncode == 1
    assert "not in PATH: source settings64.sh of Vitis" in found.stderr
    assert not (tmp_path / "out").exists()
    assert PLATFORM in script.read_text()


def test_all_files_say_that_they_were_never_run() -> None:
    files = [path for path in VENDOR.iterdir() if path.is_file()]
    assert len(files) >= 4
    for path in files:
        text = " ".join(path.read_text().split())
        assert re.search(r"ritten to the documented interface[^.]*never run", text), path
    for text in (connectivity(), registers_tcl(), *map(rtl_top, READ_PORTS)):
        assert "never run" in text
