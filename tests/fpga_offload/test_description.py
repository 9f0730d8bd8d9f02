"""The one description, and what is generated from it."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from vllm_ssdkv.base.errors import FpgaError, FpgaVersionError
from vllm_ssdkv.cli.docs import docs
from vllm_ssdkv.fpga_offload import description
from vllm_ssdkv.fpga_offload.backend import check_status, partials_of
from vllm_ssdkv.fpga_offload.description import (
    ATTEND,
    BEAT_BYTES,
    CHANNEL_BEAT_BYTES,
    CHOICE,
    DTYPES,
    ENTRY,
    GROUPS,
    HEAD_SIZES,
    KERNELS,
    LAYOUTS,
    MAX_GROUP,
    STATUS,
    VERSION,
    Flag,
    Kernel,
    KernelShape,
    Status,
    shape_problem,
)
from vllm_ssdkv.fpga_offload.generate import DIRECTORY, FILES, lists
from vllm_ssdkv.fpga_offload.library import ARGUMENTS


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: str(kernel.name))
def test_registers_lie_apart_from_0x10_on(kernel: Kernel) -> None:
    registers = kernel.registers()
    assert registers[0].offset == 0x10
    for one, following in itertools.pairwise(registers):
        assert one.offset % 4 == 0
        assert following.offset == one.offset + one.argument.nbytes + 4
    assert len({argument.name for argument in kernel.arguments}) == len(kernel.arguments)


def test_addresses_have_a_port_and_numbers_none() -> None:
    for kernel in KERNELS:
        for argument in kernel.arguments:
            assert (argument.kind == "address") == bool(argument.port)
            assert argument.kind == "address" or argument.direction == "in"


def test_records_fill_whole_beats_or_quarters() -> None:
    for layout in LAYOUTS:
        assert layout.nbytes == layout.dtype.itemsize
        assert BEAT_BYTES % layout.nbytes == 0 or layout.nbytes % BEAT_BYTES == 0
    assert ENTRY.nbytes == 16
    assert STATUS.nbytes == BEAT_BYTES
    for size in HEAD_SIZES:
        for group in GROUPS:
            assert description.partial_bytes(size, group) % BEAT_BYTES == 0


def test_shapes_without_kernels_say_what_there_is() -> None:
    with pytest.raises(ValueError, match="no head size 96, only 64, 128, 256"):
        KernelShape(96, 1, "float16")
    assert "no query heads per KV head 3" in shape_problem(64, 3, "float16")
    assert "no KV dtype float32" in shape_problem(64, 4, "float32")
    assert not shape_problem(HEAD_SIZES[0], GROUPS[0], DTYPES[0])


def test_the_c_structures_are_the_descriptions() -> None:
    """Sizes and offsets as a compiler has them; arguments as ctypes passes them."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    lines = ["#include <stddef.h>", '#include "ssdkv_fpga.h"']
    for layout in LAYOUTS:
        name = f"ssdkv_fpga_{layout.name}"
        lines.append(
            f"static_assert(sizeof({name}) == {layout.nbytes}, {name!r});".replace("'", '"')
        )
        lines += [
            f'static_assert(offsetof({name}, {field.name}) == {offset}, "{field.name}");'
            for field, offset in layout.offsets()
        ]
    for kernel in KERNELS:
        name, structure = f"ssdkv_fpga_{kernel.name}_args", ARGUMENTS[kernel.name]
        for argument in kernel.arguments:
            offset = getattr(structure, argument.name).offset
            lines.append(f'static_assert(offsetof({name}, {argument.name}) == {offset}, "");')
    for flag in Flag:
        lines.append(f'static_assert(SSDKV_FPGA_FLAG_{flag.name} == {int(flag)}, "");')
    subprocess.run(
        [compiler, "-xc++", "-std=c++14", "-fsyntax-only", f"-I{DIRECTORY}", "-"],
        input="\n".join(lines),
        text=True,
        check=True,
        timeout=60,
    )


def test_ports_of_channels_are_half_as_wide() -> None:
    text = (DIRECTORY / "sparf.xml").read_text()
    widths = dict(re.findall(r'<port name="(\w+)" mode="master" [^>]*dataWidth="(\d+)"', text))
    assert widths.pop("gmem_channels") == str(8 * CHANNEL_BEAT_BYTES)
    assert set(widths.values()) == {str(8 * BEAT_BYTES)}


def test_lists_name_everything() -> None:
    text = lists()
    for kernel in KERNELS:
        for register in kernel.registers():
            assert f"- `{register.argument.name}` ({register.offset:#05x}, " in text
    for layout in LAYOUTS:
        assert all(f"- `{field.name}` ({at}, " in text for field, at in layout.offsets())


def test_a_stale_file_is_found_and_written_anew(tmp_path: Path) -> None:
    folder = tmp_path / "fpga_offload" / "generated"
    folder.mkdir(parents=True)
    pages = tmp_path / "docs"
    run = CliRunner().invoke
    assert run(docs.app, ["write", str(pages)]).exit_code == 0
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    header = folder / "ssdkv_fpga.h"
    fresh = header.read_text()
    header.write_text(fresh.replace("SSDKV_FPGA_VERSION 1u", "SSDKV_FPGA_VERSION 2u"))
    found = run(docs.app, ["check", str(pages)])
    assert found.exit_code == 1
    assert "-#define SSDKV_FPGA_VERSION 2u" in found.output
    assert run(docs.app, ["write", str(pages)]).exit_code == 0
    assert header.read_text() == fresh


@pytest.mark.parametrize("code", [code for code in Status if code != Status.OK])
def test_every_status_has_a_text(code: Status) -> None:
    with pytest.raises(FpgaError, match=r"^attend: .*(3|dtype|jobs)"):
        check_status(ATTEND, code, 3, VERSION)
    check_status(ATTEND, Status.OK, 3, VERSION)


def test_an_unknown_status_and_another_version_are_errors() -> None:
    with pytest.raises(FpgaError, match="unknown status 99"):
        check_status(ATTEND, 99, 0, VERSION)
    with pytest.raises(FpgaVersionError, match="version 7, and version 1"):
        check_status(ATTEND, Status.OK, 0, 7)


def test_partials_keep_their_reference_in_natural_units() -> None:
    """Far from 0 m is rounded by more than the sums; what it loses they get."""
    shape = KernelShape(64, 2, "float16")
    raw = np.zeros(shape.partial_bytes, np.uint8)
    floats = raw.view(np.float32)
    floats[: 2 * 64] = 3
    floats[128 : 128 + 2] = 30001, -np.inf
    floats[128 + MAX_GROUP : 128 + MAX_GROUP + 2] = 1.5, 0
    acc, m, total = partials_of(raw, shape, 1)
    assert m[0, 1] == -np.inf
    lse = np.float64(m[0, 0]) + np.log(np.float64(total[0, 0]))
    np.testing.assert_allclose(lse, 30001 * np.log(2) + np.log(1.5), rtol=0, atol=1e-6)
    np.testing.assert_allclose(acc[0, 0] / total[0, 0], 2, rtol=1e-6)
    assert CHOICE.nbytes == 2 * BEAT_BYTES
