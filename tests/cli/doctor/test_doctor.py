"""``ssdkv doctor``: each check against a healthy and a broken place."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from vllm_ssdkv.base import host
from vllm_ssdkv.base.host import Mount
from vllm_ssdkv.base.sizes import GIB, MIB
from vllm_ssdkv.cli.bench import measure
from vllm_ssdkv.cli.bench.measure import Rates
from vllm_ssdkv.cli.doctor import check_devices, check_host, check_software, doctor
from vllm_ssdkv.cli.doctor.check_result import Finding, Level, fail, ok, warn
from vllm_ssdkv.cli.main import app
from vllm_ssdkv.store.integrity import cipher


def by_subject(findings: list[Finding]) -> dict[str, Finding]:
    assert len({finding.subject for finding in findings}) == len(findings)
    return {finding.subject: finding for finding in findings}


# --- software


@pytest.mark.parametrize(
    ("version", "level"),
    [
        ("0.32.0", Level.OK),
        ("0.32.1.post1+cpu", Level.OK),
        ("0.33.2", Level.OK),
        ("0.31.9", Level.FAIL),
        ("0.34.0rc1", Level.FAIL),
        ("1.32.0", Level.FAIL),
        ("dev", Level.WARN),
        (None, Level.FAIL),
    ],
)
def test_vllm_version(version: str | None, level: Level) -> None:
    finding = check_software.vllm_version(version)
    assert finding.level is level
    if level is not Level.OK:
        assert finding.cure == "install vllm>=0.32,<0.34"


def test_installed_versions_are_found() -> None:
    found = by_subject(check_software.versions())
    assert found["vllm"].level is found["torch"].level is Level.OK
    assert found["python"].text == ".".join(map(str, sys.version_info[:3]))


@pytest.mark.parametrize(
    ("values", "allowed", "level"),
    [
        (["vllm_ssdkv.plugin:register"], None, Level.OK),
        (["vllm_ssdkv.plugin:register"] * 2, None, Level.OK),
        (["vllm_ssdkv.plugin:register"], "lora,ssdkv", Level.OK),
        (["vllm_ssdkv.plugin:register"], "lora", Level.FAIL),
        (["vllm_ssdkv.plugin:register"], "", Level.FAIL),
        (["other:register", "vllm_ssdkv.plugin:register"], None, Level.FAIL),
        ([], None, Level.FAIL),
    ],
)
def test_entry_point(values: list[str], allowed: str | None, level: Level) -> None:
    points = [EntryPoint("ssdkv", value, check_software.PLUGIN_GROUP) for value in values]
    assert check_software.entry_point(points, allowed).level is level


@pytest.mark.parametrize(
    ("count", "allowed", "level", "text"),
    [
        (0, None, Level.FAIL, "0 times"),
        (2, None, Level.FAIL, "2 times"),
        (1, None, Level.OK, "off; VLLM_PLUGINS=ssdkv,ssdkv_batch"),
        (1, "ssdkv", Level.OK, "off"),
        (1, "ssdkv,ssdkv_batch", Level.OK, "on"),
    ],
)
def test_batch_entry_point(count: int, allowed: str | None, level: Level, text: str) -> None:
    points = [EntryPoint("ssdkv_batch", "a:b", check_software.BATCH_GROUP)] * count
    finding = check_software.batch_entry_point(points, allowed)
    assert finding.level is level
    assert finding.text.startswith(text)


def test_native_modules_are_there_and_name_their_instruction_set() -> None:
    found = by_subject(check_software.native_modules())
    assert set(found) == {"_io", "_index", "_kernels"}
    assert {finding.level for finding in found.values()} == {Level.OK}
    assert "instruction set" in found["_kernels"].text


def test_a_missing_native_module_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm_ssdkv._io", None)
    found = by_subject(check_software.native_modules())
    assert found["_io"].level is Level.FAIL
    assert found["_kernels"].level is Level.OK


def test_encryption_says_which_library_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = check_software.encryption()
    assert finding.level is Level.OK
    assert "AES-256-GCM by OpenSSL " in finding.text
    monkeypatch.setattr(cipher._io, "libcrypto", lambda: ("", "no such file"))
    (finding,) = check_software.encryption()
    assert finding.level is Level.WARN
    assert "no such file" in finding.text


def test_probe_of_a_healthy_vllm() -> None:
    lines = {
        "cuda": {"value": "NVIDIA X"},
        "import": {"value": "0.32.0"},
        "connector": {"value": "vllm_ssdkv.connector.connector"},
    }
    found = by_subject(check_software.read_probe(0, f"log line\n\n{json.dumps(lines)}\n", ""))
    assert {finding.level for finding in found.values()} == {Level.OK}
    assert found["CUDA"].text == "NVIDIA X"


def test_probe_of_an_unregistered_connector() -> None:
    lines = {
        "cuda": {"value": ""},
        "import": {"value": "0.32.0"},
        "connector": {"error": "ValueError: Connector 'SSDKVConnector' is not registered."},
    }
    found = by_subject(check_software.read_probe(0, json.dumps(lines), ""))
    assert found["connector SSDKVConnector"].level is Level.FAIL
    assert "not registered" in found["connector SSDKVConnector"].text
    assert found["CUDA"].level is Level.WARN


@pytest.mark.parametrize(("returncode", "stdout"), [(-11, ""), (1, "{}"), (0, ""), (0, "noise")])
def test_probe_that_crashed(returncode: int, stdout: str) -> None:
    (finding,) = check_software.read_probe(returncode, stdout, "line\nlast words\n")
    assert finding.level is Level.FAIL
    assert f"status {returncode}" in finding.text
    assert "last words" in finding.text


def test_probe_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_software, "_PROBE", "import time; time.sleep(600)")
    (finding,) = check_software.probe_vllm(timeout_s=1)
    assert finding.level is Level.FAIL
    assert "1 s" in finding.text


# --- this machine


def test_huge_pages(tmp_path: Path) -> None:
    setting = tmp_path / "enabled"
    levels = []
    for text in ("[always] madvise never", "always [madvise] never", "always madvise [never]"):
        setting.write_text(text + "\n")
        levels.append(check_host.huge_pages(setting).level)
    assert levels == [Level.OK, Level.OK, Level.WARN]
    assert check_host.huge_pages(tmp_path / "none").text == "not supported"


def test_little_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_host, "available_memory", lambda: 100 * MIB)
    assert check_host.memory().level is Level.WARN
    monkeypatch.setattr(check_host, "available_memory", lambda: 100 * GIB)
    assert check_host.memory().level is Level.OK


# --- devices


@pytest.mark.parametrize(
    ("kind", "level"),
    [
        ("ext4", Level.OK),
        ("xfs", Level.OK),
        ("tmpfs", Level.WARN),
        ("nfs4", Level.WARN),
        ("fuse.sshfs", Level.WARN),
        ("overlay", Level.WARN),
    ],
)
def test_filesystem(kind: str, level: Level) -> None:
    assert check_devices.filesystem("d", Mount("/", kind, "/dev/x")).level is level


def test_the_longest_and_newest_mount_holds_a_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = [
        "22 1 259:1 / / rw - ext4 /dev/root rw",
        f"23 22 0:30 / {tmp_path}/a\\040b rw shared:1 - tmpfs old rw",
        f"24 22 0:31 / {tmp_path}/a\\040b rw shared:1 master:2 - xfs /dev/nvme0n1 rw",
    ]
    table = tmp_path / "mountinfo"
    table.write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(host, "MOUNTS", table)
    (tmp_path / "a b").mkdir()
    assert check_devices.mount_of(tmp_path / "a b" / "later" / "still") == Mount(
        f"{tmp_path}/a b", "xfs", "/dev/nvme0n1"
    )
    assert check_devices.mount_of(tmp_path) == Mount("/", "ext4", "/dev/root")


def test_a_good_directory(
    tmp_devices: Callable[[int], list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_devices, "MAX_BYTES", 4 * MIB)
    (path,) = tmp_devices(1)
    found = by_subject(check_devices.device(path))
    found.pop(f"{path}: drive", None)  # not everywhere is there one, see test_check_drives.py
    assert set(found) == {str(path)} | {
        f"{path}: {what}" for what in ("file system", "space", "flock", "O_DIRECT", "speed")
    }
    assert found[str(path)].level is found[f"{path}: flock"].level is Level.OK
    assert "4 MiB" in found[f"{path}: speed"].text
    assert list(path.iterdir()) == [], "nothing is left behind"


def test_a_directory_that_is_not_there_yet_is_not_created(tmp_path: Path) -> None:
    path = tmp_path / "a"
    found = by_subject(check_devices.device(path))
    assert found[str(path)].text == f"will be created in {tmp_path}"
    assert list(tmp_path.iterdir()) == []


def test_only_the_cache_directory_may_lack_its_parents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an engine has it."""
    path = tmp_path / "a" / "ssdkv"
    (finding,) = check_devices.device(path)
    assert finding.level is Level.FAIL
    assert f"nor does {path.parent}" in finding.text
    assert f"mkdir -p {path}" in finding.cure
    monkeypatch.setenv("XDG_CACHE_HOME", str(path.parent))
    assert by_subject(check_devices.device(path))[str(path)].level is Level.OK
    assert list(tmp_path.iterdir()) == []


def test_places_that_cannot_hold_a_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (finding,) = check_devices.device(tmp_path / "file")
    assert (finding.level, "not a directory" in finding.text) == (Level.FAIL, True)


def test_a_directory_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Root may write everywhere: the answer of the system call is replaced.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    (finding,) = check_devices.device(tmp_path)
    assert (finding.level, "not writable" in finding.text) == (Level.FAIL, True)


def test_a_full_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_devices, "free_bytes", lambda path: 0)
    found = by_subject(check_devices.device(tmp_path))
    assert found[f"{tmp_path}: space"].level is Level.FAIL
    assert f"{tmp_path}: speed" not in found, "nothing is written to a full device"


def test_a_device_that_does_not_answer() -> None:
    release = threading.Event()
    try:
        found = check_devices.with_deadline(lambda: [ok("d", str(release.wait(60)))], "d", 0.05)
    finally:
        release.set()
    assert [(finding.level, "no answer" in finding.text) for finding in found] == [
        (Level.FAIL, True)
    ]


def test_a_device_that_refuses() -> None:
    def work() -> list[Finding]:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    (finding,) = check_devices.with_deadline(work, "d")
    assert (finding.level, finding.text) == (Level.FAIL, os.strerror(errno.EIO))


def test_speed_tells_slow_and_buffered_devices() -> None:
    fast = by_subject(check_devices.speed("d", Rates(True, 64 * MIB, 2e9, 3e9)))
    assert {finding.level for finding in fast.values()} == {Level.OK}
    assert fast["d: speed"].text.startswith("write 2,000 MB/s, read 3,000 MB/s (64 MiB")
    slow = by_subject(check_devices.speed("d", Rates(False, 64 * MIB, None, 1e8)))
    assert {finding.level for finding in slow.values()} == {Level.WARN}
    assert "write" not in slow["d: speed"].text


def test_measuring_moves_exactly_the_bytes_it_says(
    tmp_devices: Callable[[int], list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = tmp_devices(1)
    sizes: list[int] = []
    with measure.temporary_file(path) as fd:
        assert list(path.iterdir()) == [], "the file has no name from the start"
        rates = measure.measure_file(fd, 3 * MIB)
        sizes.append(os.fstat(fd).st_size)
    assert (rates.nbytes, sizes) == (3 * MIB, [3 * MIB])
    assert rates.write is not None
    assert rates.write > 0
    assert rates.read is not None
    assert rates.read > 0


def test_a_short_read_is_an_error(tmp_devices: Callable[[int], list[Path]]) -> None:
    (path,) = tmp_devices(1)
    with measure.temporary_file(path) as fd:
        os.ftruncate(fd, MIB)
        with pytest.raises(OSError, match="0 of 524288 bytes"):
            measure.measure_reads(fd, 2 * MIB)


def test_a_mounted_raw_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_devices, "mounts", lambda: [Mount("/", "ext4", "/dev/nvme9n1")])
    (finding,) = check_devices.raw_device(Path("/dev/nvme9n1"))
    assert (finding.level, "mounted" in finding.text) == (Level.FAIL, True)


# --- the command


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    """Replaces the import of vLLM in a child process; the list may be changed by the test."""
    probed: list[Finding] = [ok("connector SSDKVConnector", "loads")]
    monkeypatch.setattr(check_software, "probe_vllm", lambda: probed)
    monkeypatch.setattr(check_devices, "MAX_BYTES", MIB)
    return probed


def test_json_and_exit_code(quick: list[Finding], tmp_path: Path) -> None:
    other = tmp_path / "other"
    arguments = ["doctor", "--json", "--device", str(tmp_path), "--device", str(other)]
    result = CliRunner().invoke(app, arguments)
    findings = json.loads(result.output)
    assert {str(tmp_path), str(other), "vllm", "memory"} <= {item["subject"] for item in findings}
    assert all(set(item) == {"subject", "level", "text", "cure"} for item in findings)
    assert all(item["cure"] for item in findings if item["level"] != "ok")
    assert result.exit_code == 0

    quick.append(fail("d", "broken", "mend it"))
    result = CliRunner().invoke(app, arguments)
    assert json.loads(result.output)[-1]["level"] != "fail"
    assert result.exit_code == 1


def test_default_device_is_the_cache_directory(
    quick: list[Finding], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert str(tmp_path / "ssdkv") in {item["subject"] for item in json.loads(result.output)}
    assert list(tmp_path.iterdir()) == []


def test_text_has_each_finding_with_its_cure() -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    doctor.render([ok("a", "fine"), warn("b", "slow", "buy"), fail("c", "[dead]", "mend")], console)
    lines = [line.split() for line in console.export_text().splitlines()]
    assert lines == [
        ["ok", "a", "fine"],
        ["warn", "b", "slow"],
        ["->", "buy"],
        ["fail", "c", "[dead]"],
        ["->", "mend"],
        ["1", "ok,", "1", "warn,", "1", "fail"],
    ]


COMMAND = "from vllm_ssdkv.cli.main import app; app()"


@pytest.mark.slow
def test_this_environment_is_ready(tmp_path: Path) -> None:
    """The installed command, vLLM's real plugin loading, from a folder with nothing in it."""
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "doctor", "--json", "--device", "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    findings = by_subject([Finding(**item) for item in json.loads(done.stdout)])
    assert [finding for finding in findings.values() if finding.level == Level.FAIL] == []
    assert findings["connector SSDKVConnector"].text == "loads (vllm_ssdkv.connector.connector)"
    assert done.returncode == 0
