"""Effects of container runtimes' verbs on a node: docs/shared-cache.md names them.

The start-up path of the image is run in a root file system made for the test, and in one built from
the Containerfile in `make soak`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.deploy.container import CONFIG, Container, build, why_not
from tests.deploy.manifests import DEPLOY, as_list, compose, environment, of_stage

NOT_HERE = why_not()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(NOT_HERE), reason=NOT_HERE)]

STATUS = compose()["services"]["node"]["healthcheck"]["test"][1:]
SOCKET = STATUS[-1].removeprefix("unix://")


@pytest.fixture
def store(tmp_devices: Callable[[int], list[Path]]) -> Path:
    (found,) = tmp_devices(1)
    return found


@pytest.fixture(
    scope="module",
    params=[None, pytest.param("built", marks=[pytest.mark.soak, pytest.mark.timeout(2400)])],
)
def image(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    if request.param is None:
        return None
    for program in ("buildah", "debootstrap"):
        if shutil.which(program) is None:
            pytest.skip(f"no {program}")
    return build(tmp_path_factory.mktemp("image"))


@pytest.fixture
def create(store: Path, tmp_path: Path, image: Path | None) -> Iterator[Callable[[], Container]]:
    """Makes containers with the same volumes; at the end none runs."""
    options = tmp_path / "node.yaml"
    # Of the compose file, with less memory.
    options.write_text(
        yaml.safe_dump(yaml.safe_load((DEPLOY / "node.yaml").read_text()) | {"dram_gib": 0.1})
    )
    options.chmod(0o644)
    made: list[Container] = []

    def container() -> Container:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Container(folder, store, options, image))
        return made[-1]

    yield container
    for one in made:
        if one.process is not None and one.process.poll() is None:
            one.kill()
            one.wait()


def files(store: Path) -> set[str]:
    return {str(path.relative_to(store)) for path in store.rglob("*") if not path.is_dir()}


def test_create_start_logs_stop(create: Callable[[], Container], store: Path) -> None:
    container = create()
    assert files(store) == set(), "create: nothing runs, nothing is written"
    container.start()
    container.until_it_serves(STATUS)
    assert (store / SOCKET.lstrip("/")).is_socket()
    assert "listens at" in container.logs(), "logs: what it says goes to the output"
    check_rights(container)
    assert container.stop() == 0, "stop: SIGTERM drains it"
    assert not (store / SOCKET.lstrip("/")).exists()
    assert "ended" in container.logs()
    container.remove()


def check_rights(container: Container) -> None:
    """It is a user without a name, with no rights, and writes to its volumes only."""
    uid, _, gid = of_stage("node", "USER")[0].partition(":")
    status = Path(f"/proc/{container.pid()}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    assert fields["Uid"].split() == [uid] * 4
    assert fields["Gid"].split() == [gid] * 4
    assert fields["NSpid"].split()[-1] == "1", "signals reach it as the first process"
    for kind in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(fields[kind], 16) == 0, kind
    assert fields["NoNewPrivs"].strip() == "1"
    for folder in ("/", "/etc", "/etc/ssdkv", "/opt", "/usr", "/var/lib"):
        assert container.execute("touch", f"{folder}/new").returncode != 0, folder
    assert container.execute("sh", "-c", f"echo >> {CONFIG}").returncode != 0
    for volume in (*as_list(of_stage("node", "VOLUME")[0]), environment("node")["HOME"]):
        assert container.execute("touch", f"{volume}/new").returncode == 0, volume
    loaded = container.execute("cat", "/proc/1/maps").stdout
    assert "vllm_ssdkv/_" in loaded, "native modules are loaded"
    assert "torch" not in loaded


def test_restart_kill_rm(create: Callable[[], Container], store: Path) -> None:
    container = create()
    container.start()
    container.until_it_serves(STATUS)
    written = container.execute("sh", "-c", "echo kept > /var/lib/ssdkv/kept; echo > /tmp/gone")
    assert written.returncode == 0
    container.kill()
    assert container.wait() != 0, "kill: nothing is written any more"
    assert (store / SOCKET.lstrip("/")).exists(), "a socket is left, and in nobody's way"
    container.start()
    container.until_it_serves(STATUS)
    assert container.stop() == 0, "restart"
    container.remove()
    other = create()
    other.start()
    other.until_it_serves(STATUS)
    answer = other.execute(*STATUS, "--json")
    assert json.loads(answer.stdout)["draining"] is False
    assert (store / "var/lib/ssdkv/kept").read_text() == "kept\n", "rm: volumes stay"
    assert other.execute("test", "-e", "/tmp/gone").returncode == 1
    assert other.stop() == 0


def test_wrong_options_end_it_with_the_reason(
    create: Callable[[], Container], tmp_path: Path
) -> None:
    (tmp_path / "node.yaml").write_text("listen: []\n")
    container = create()
    container.start()
    assert container.wait() == 1
    assert "listen: got []" in container.logs()
