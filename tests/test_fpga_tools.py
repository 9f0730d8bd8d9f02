"""scripts/fpga.sh: what is missing is named, and nothing is installed that nobody asked for."""

import shutil
import subprocess
from pathlib import Path

from tests.fpga_offload.needs import needs_rtlsim

ROOT = Path(__file__).parent.parent
REAL = "bash env dirname flock uname id tr sed grep cat mkdir"


def run(folder: Path, *shapes: str, apt: str) -> tuple[int, str]:
    """Exit status and output on a machine without any of the tools."""
    (folder / "bin").mkdir(exist_ok=True)
    for name in REAL.split():
        real = shutil.which(name)
        assert real is not None
        if not (folder / "bin" / name).exists():
            (folder / "bin" / name).symlink_to(real)
    for name in ("scripts/fpga.sh", "scripts/apt.sh", "requirements/fpga.lock"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    done = subprocess.run(
        [folder / "scripts/fpga.sh", *shapes],
        env={"PATH": str(folder / "bin"), "SSDKV_APT": apt, "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_missing_tools_are_named(tmp_path: Path) -> None:
    status, said = run(tmp_path, apt="0")
    assert status == 1
    assert "please install (Debian and Ubuntu names): verilator iverilog make g++" in said
    assert "SSDKV_APT=1" in said
    assert not (tmp_path / "build").exists()


def test_an_unknown_answer_about_apt_is_refused(tmp_path: Path) -> None:
    apt = tmp_path / "bin/apt-get"
    apt.parent.mkdir()
    apt.write_text("#!/bin/sh\necho called\n")
    apt.chmod(0o755)
    status, said = run(tmp_path, apt="perhaps")
    assert status == 1
    assert "SSDKV_APT=perhaps" in said
    assert "called" not in said


@needs_rtlsim(64, 2)
def test_an_unknown_shape_is_refused() -> None:
    done = subprocess.run(
        [ROOT / "scripts/fpga.sh", "96:3"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "96:3: no such shape" in done.stderr
