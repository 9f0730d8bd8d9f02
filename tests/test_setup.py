"""scripts/setup.sh on a machine of stand-ins: when system packages are installed, and when named.

The stand-ins of apt-get and sudo write down how they were called. No package, no network.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.test_namespace import FOLDERS

ROOT = Path(__file__).parent.parent
REAL = (
    "bash cat chmod cut dirname env find flock grep install ln mkdir rm sed sha256sum sort tee "
    "timeout touch tr uname xargs"
)

RECORD = """#!/bin/bash
echo "called: ${0##*/} $*" | tee -a "$CALLS"
"""
SUDO = RECORD + 'exec "$@"\n'
APT_GET = RECORD + '[[ "$*" != *download* ]] || touch prometheus_1.deb\n'
DPKG_DEB = """#!/bin/bash
mkdir -p "$3/usr/bin" && touch "$3/usr/bin/prometheus" "$3/usr/bin/promtool"
"""
COMPILER = "#!/bin/bash\ncat >/dev/null\n"
# Answers questions about this interpreter; an environment that it makes only looks like one.
PYTHON = f"""#!/bin/bash
[ "$1" = -c ] && exec {sys.executable} "$@"
mkdir -p "$4/bin" "$4/site"
printf '#!/bin/bash\\n[[ "$*" != *sysconfig* ]] || echo "%s"\\n' "$PWD/$4/site" >"$4/bin/python"
printf '#!/bin/bash\\n' >"$4/bin/pip"
chmod +x "$4/bin/python" "$4/bin/pip"
"""


@dataclass
class Machine:
    """A checkout and a PATH of stand-ins.

    Attributes:
        calls: Calls of apt-get and sudo in the last run, by line.
    """

    root: Path
    calls: list[str] = field(default_factory=list)

    def put(self, name: str, script: str) -> None:
        path = self.root / "bin" / name
        path.write_text(script)
        path.chmod(0o755)

    def setup(self, user: int, apt: str | None = None, *arguments: str) -> tuple[int, str]:
        """Exit status and output of setup.sh, run by the user with this number."""
        self.put("id", f"#!/bin/bash\necho {user}\n")
        recorded = self.root / "calls"
        recorded.write_text("")
        environment = {"PATH": str(self.root / "bin"), "CALLS": str(recorded), "HOME": "/nowhere"}
        if apt is not None:
            environment["SSDKV_APT"] = apt
        ended = subprocess.run(
            [self.root / "checkout/scripts/setup.sh", *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=False,
        )
        self.calls = recorded.read_text().splitlines()
        return ended.returncode, ended.stdout

    @property
    def environment_is_ready(self) -> bool:
        return (self.root / "checkout/.venv/.installed").exists()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Python and apt-get are there; a compiler, liburing and Prometheus are not."""
    made, checkout = Machine(tmp_path), tmp_path / "checkout"
    (tmp_path / "bin").mkdir()
    for name in REAL.split():
        real = shutil.which(name)
        assert real is not None
        (tmp_path / "bin" / name).symlink_to(real)
    for name, script in {
        "sudo": SUDO,
        "apt-get": APT_GET,
        "dpkg-deb": DPKG_DEB,
        "python3": PYTHON,
    }.items():
        made.put(name, script)
    needed = (
        "scripts/setup.sh",
        "scripts/apt.sh",
        "scripts/build_backend.py",
        "requirements/cpu.lock",
    )
    for name in needed:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    for name in ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, checkout / name)
    for name in ("vllm_ssdkv", *FOLDERS, "third_party"):
        (checkout / name).mkdir()
        (checkout / name / "__init__.py").touch()
    return made


def test_a_user_is_told_what_is_missing(machine: Machine) -> None:
    status, output = machine.setup(user=1000)
    assert status == 1
    assert machine.calls == []
    last = output.splitlines()[-1]
    assert "please install (Debian and Ubuntu names): g++;" in last
    assert "SSDKV_APT=1" in last
    assert not (machine.root / "checkout/.venv").exists()


def test_root_has_it_installed_after_a_line_that_says_so(machine: Machine) -> None:
    status, output = machine.setup(user=0)
    assert status == 0, output
    assert machine.environment_is_ready
    assert machine.calls
    assert not [call for call in machine.calls if "sudo" in call]
    said = output.index("setup: installing system packages with apt-get: g++\n")
    assert said < output.index("called: apt-get")
    installed = [call.split()[-1] for call in machine.calls if " install " in call]
    assert installed == ["g++", "liburing-dev"]
    assert (machine.root / "checkout/.venv/bin/promtool").exists()


def test_who_asks_for_it_gets_it_through_sudo(machine: Machine) -> None:
    status, output = machine.setup(1000, "1")
    assert status == 0, output
    said = output.index("sudo apt-get, as SSDKV_APT=1 asks: g++\n")
    assert said < output.index("called: sudo")
    installed = [call for call in machine.calls if "called: sudo" in call and " install " in call]
    assert [call.split()[-1] for call in installed] == ["g++", "liburing-dev"]


def test_root_may_forbid_it(machine: Machine) -> None:
    status, output = machine.setup(0, "0")
    assert status == 1
    assert machine.calls == []
    assert "g++" in output.splitlines()[-1]


def test_where_nothing_that_is_needed_is_missing_nothing_is_called(machine: Machine) -> None:
    machine.put("c++", COMPILER)
    status, output = machine.setup(user=1000)
    assert status == 0, output
    assert machine.calls == []
    assert "no Prometheus (Debian and Ubuntu: prometheus)" in output


def test_what_apt_get_cannot_install_is_named(machine: Machine) -> None:
    machine.put("apt-get", RECORD + "exit 100\n")
    status, output = machine.setup(user=0)
    assert status == 1
    assert len(machine.calls) == 1
    assert "please install (Debian and Ubuntu names): g++;" in output.splitlines()[-1]


@pytest.mark.parametrize(
    ("apt", "arguments", "line"),
    [
        ("yes", [], "SSDKV_APT=yes: 1 lets this script install system packages, 0 forbids it"),
        (None, ["--editible"], "--editible: unknown; --editable or --wheel"),
    ],
)
def test_a_typing_error_ends_it(
    machine: Machine, apt: str | None, arguments: list[str], line: str
) -> None:
    status, output = machine.setup(0, apt, *arguments)
    assert (status, machine.calls) == (1, [])
    assert output.splitlines()[-1] == f"setup: {line}"


def test_an_install_stays_of_the_kind_that_was_asked_for_last(machine: Machine) -> None:
    machine.put("c++", COMPILER)
    checkout = machine.root / "checkout"
    links, wheel = "links to the sources", "the wheel"

    def built(*arguments: str) -> list[str]:
        output = machine.setup(1000, None, *arguments)[1]
        return [kind for kind in (links, wheel) if f"building and installing {kind}" in output]

    module = checkout / "vllm_ssdkv/__init__.py"
    assert built() == [wheel]
    assert built() == []
    assert built("--editable") == [links]
    assert os.readlink(checkout / "vllm_ssdkv/profiling") == "../profiling"
    module.write_text("EDITED = True\n")
    assert built() == []
    (checkout / "vllm_ssdkv/moved.py").touch()
    assert built() == [links]
    (checkout / "CMakeLists.txt").write_text("project(changed)\n")
    assert built() == [links]
    assert built("--wheel") == [wheel]
    assert not (checkout / "vllm_ssdkv/profiling").exists()
    module.write_text("EDITED = False\n")
    assert built() == [wheel]
    assert os.listdir(checkout / "build") == []
