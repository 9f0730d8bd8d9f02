"""Editable installs: sources are what is imported, and only under `vllm_ssdkv`.

The build configuration and backend are the project's own; folders and CMakeLists.txt stand for its
sources, so that nothing is compiled.
"""

import base64
import csv
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.test_namespace import FOLDERS, probe

ROOT = Path(__file__).parent.parent
BUILD = "import build_backend, sys; print(build_backend.build_editable(sys.argv[1]))"
CMAKE_LISTS = """
cmake_minimum_required(VERSION 3.24)
project(stand_in LANGUAGES NONE)
file(WRITE ${CMAKE_BINARY_DIR}/_native.py "BUILT = True\\n")
install(FILES ${CMAKE_BINARY_DIR}/_native.py DESTINATION vllm_ssdkv)
"""
"""`_native.py` stands for the extension modules: made by the build, no source."""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree with the project's pyproject.toml and backend, and an empty package a folder."""
    made = tmp_path_factory.mktemp("project")
    (made / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/build_backend.py", made / "scripts")
    (made / "CMakeLists.txt").write_text(CMAKE_LISTS)
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, made / name)
    shutil.copytree(ROOT / "third_party", made / "third_party")
    for name in ("vllm_ssdkv", *FOLDERS):
        (made / name).mkdir()
        (made / name / "__init__.py").write_text('__version__ = "1.0.0"\n')
    return made


@pytest.fixture(scope="module")
def wheel(project: Path) -> Path:
    """The editable wheel of `project`."""
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(
        [sys.executable, "-c", BUILD, str(project / "dist")],
        cwd=project,
        env={**os.environ, "PATH": tools, "PYTHONPATH": str(project / "scripts")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return project / "dist" / ended.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def interpreter(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has nothing installed but `wheel`."""
    environment = tmp_path_factory.mktemp("environment")
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", environment], timeout=60, check=True
    )
    (site,) = environment.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return environment / "bin/python"


def test_bare_names_stay_free(interpreter: Path, project: Path, tmp_path: Path) -> None:
    nested = [f"vllm_ssdkv.{name}" for name in FOLDERS]
    found = probe(tmp_path, list(FOLDERS), nested, str(interpreter))
    assert found["bare"] == []
    assert found["nested"] == nested
    assert found["package"] == str(project / "vllm_ssdkv/__init__.py")


def test_edits_are_seen_without_a_build(interpreter: Path, project: Path, tmp_path: Path) -> None:
    (project / "profiling/__init__.py").write_text("EDITED = 1\n")
    (project / "vllm_ssdkv/added").mkdir()
    (project / "vllm_ssdkv/added/__init__.py").write_text("ADDED = 2\n")
    shown = subprocess.run(
        [
            interpreter,
            "-c",
            "import json; from vllm_ssdkv import _native, added, profiling;"
            "print(json.dumps([profiling.EDITED, added.ADDED, _native.BUILT]))",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout) == [1, 2, True]


def test_the_record_describes_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/RECORD"))
        rows = {row[0]: row[1:] for row in csv.reader(archive.read(name).decode().splitlines())}
        assert set(rows) == set(archive.namelist())
        assert any(row.endswith(".pth") for row in rows)
        for row, (digest, size) in rows.items():
            if row == name:
                continue
            content = archive.read(row)
            actual = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
            assert (digest, size) == (f"sha256={actual.decode()}", str(len(content)))
