"""A container without a container runtime: the start-up path of an image, from its Containerfile.

A root file system of bind mounts, or that of a built image, read-only but for the volumes, a
process that is number 1 of its own namespace, the user, the variables and the command of the image.
Needs root.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.deploy.manifests import DEPLOY, as_list, environment, of_stage

ROOT = Path(__file__).parents[2]
SITE = (
    Path(sys.prefix)
    / "lib"
    / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    / "site-packages"
)
NOT_IN_THE_IMAGE = ("torch", "vllm", "triton", "transformers", "faiss", "sklearn", "matplotlib")
"""Packages of the test environment that an image of a node lacks."""
CONFIG = "/etc/ssdkv/node.yaml"

_SETUP = """
set -e
if [ -n "$image" ]; then mount --bind "$image" "$root"
else mount -t tmpfs -o mode=0755 tmpfs "$root"
fi
cd "$root"
mkdir -p proc dev tmp opt etc/ssdkv run var/lib
mount -t proc proc proc
mount -t tmpfs -o mode=1777 tmpfs tmp
for device in null zero urandom; do
  touch dev/$device
  mount --bind /dev/$device dev/$device
done
readonly_bind() {
  mkdir -p ".$1"
  mount --rbind "$1" ".$1"
  mount -o remount,bind,ro ".$1"
}
if [ -z "$image" ]; then
  for folder in lib lib64 bin sbin; do
    if [ -L /$folder ]; then cp -P /$folder $folder; fi
  done
  for folder in $folders; do readonly_bind "$folder"; done
  for package in $hidden; do
    if [ -d ".$package" ]; then mount -t tmpfs -o ro tmpfs ".$package"; fi
  done
  ln -s "$prefix" opt/ssdkv
fi
touch ".$config"
mount --bind "$options" ".$config"
mount -o remount,bind,ro ".$config"
for volume in $volumes; do
  mkdir -p "./$volume"
  mount --bind "$store/$volume" "./$volume"
done
mount -o remount,bind,ro .
exec chroot . $become "$@"
"""


def why_not() -> str:
    """Why this machine cannot run one; empty if it can."""
    if os.geteuid() != 0:
        return "a root file system needs root"
    for program in ("unshare", "nsenter", "setpriv"):
        if shutil.which(program) is None:
            return f"no {program}"
    tried = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "mount", "-t", "tmpfs", "tmpfs", "/mnt"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return f"namespaces: {tried.stderr.strip()}" if tried.returncode else ""


def build(folder: Path) -> Path:
    """Root file system of the node's image, built by buildah over a base made by debootstrap.

    The base is named as the Containerfile has it. Packages come from Debian and from the package
    index, as pip is configured here; nothing comes from a registry of images.
    """
    base, places = folder / "base", ("--root", str(folder / "store"), "--runroot", str(folder))
    packages = "--include=python3,python3-venv,python3-dev,ca-certificates"
    _run("debootstrap", "--variant=minbase", packages, "bookworm", str(base))
    (base / "usr/bin/python").symlink_to("python3")
    buildah = "buildah", *places, "--storage-driver", "vfs"
    empty = _run(*buildah, "from", "scratch")
    _run(*buildah, "add", "--quiet", empty, str(base), "/")
    _run(*buildah, "commit", "--quiet", empty, of_stage("build", "FROM")[0])
    here = [path for path in ("/etc/ssl/certs", "/etc/pip.conf") if Path(path).exists()]
    _run(
        *(*buildah, "bud", "--pull-never", "--isolation", "chroot", "--target", "node"),
        *(f"--volume={path}:{path}:ro" for path in here),
        *("--file", str(DEPLOY / "Containerfile"), "--tag", "node"),
        *("--ignorefile", str(DEPLOY / "Containerfile.dockerignore"), str(ROOT)),
    )
    return Path(_run(*buildah, "mount", _run(*buildah, "from", "--pull-never", "localhost/node")))


def _run(*command: str) -> str:
    """What it prints, in one line."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


class Container:
    """One container of an image of ``deploy/Containerfile``, with volumes in a folder.

    Attributes:
        process: What runs it; its first child is number 1 in there.
        log: File with what it prints.
    """

    def __init__(self, folder: Path, store: Path, options: Path, image: Path | None = None) -> None:
        """Create it. Nothing runs, and nothing is written to its volumes but their owner."""
        self._image = image
        self.log = folder / "log"
        self.process: subprocess.Popen[bytes] | None = None
        self._root = folder / "root"
        self._root.mkdir()
        self._store = store
        self._options = options
        (user,) = of_stage("node", "USER")
        uid, _, gid = user.partition(":")
        (volumes,) = of_stage("node", "VOLUME")
        self._volumes = [volume.lstrip("/") for volume in as_list(volumes)]
        for volume in self._volumes:
            place = store / volume
            place.mkdir(parents=True, exist_ok=True)
            os.chown(place, int(uid), int(gid))
            place.chmod(0o750)
        variables = [f"{name}={value}" for name, value in environment("node").items()]
        self._become = [
            *("/usr/bin/setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups"),
            *("--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"),
            *("/usr/bin/env", "-i", *variables),
        ]

    def start(self) -> None:
        """Run entry point and command of the image."""
        (entry,), (rest,) = of_stage("node", "ENTRYPOINT"), of_stage("node", "CMD")
        values = {
            "root": self._root,
            "image": self._image or "",
            "folders": f"/usr {sys.base_prefix} {ROOT} {sys.prefix}",
            "hidden": " ".join(str(SITE / name) for name in NOT_IN_THE_IMAGE),
            "prefix": sys.prefix,
            "config": CONFIG,
            "options": self._options,
            "volumes": " ".join(self._volumes),
            "store": self._store,
            "become": shlex.join(self._become),
        }
        namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
        script = ["/bin/bash", "-c", _SETUP, "container", *as_list(entry), *as_list(rest)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*namespaces, *script],
                env={**os.environ, **{name: str(value) for name, value in values.items()}},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def execute(self, *command: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a command in it, as its user."""
        inside = ["nsenter", "--target", str(self.pid()), "--mount", "--pid", "--root", "--wdns=/"]
        return subprocess.run(
            [*inside, *self._become, *command],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def pid(self) -> int:
        """Of its first process, out here."""
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        deadline = time.monotonic() + 60
        while not (found := children.read_text().split()):
            assert self.process.poll() is None, self.logs()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return int(found[0])

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid(), number)

    def wait(self, timeout: float = 60.0) -> int:
        """Its exit status; some other than 0 if a signal ended it."""
        assert self.process is not None
        return self.process.wait(timeout)

    def stop(self, timeout: float = 60.0) -> int:
        self.kill(signal.SIGTERM)
        return self.wait(timeout)

    def logs(self) -> str:
        return self.log.read_text(errors="replace")

    def remove(self) -> None:
        """Remove it; volumes stay."""
        self._root.rmdir()

    def until_it_serves(self, status: Sequence[str], patience_s: float = 120.0) -> None:
        deadline = time.monotonic() + patience_s
        while self.execute(*status).returncode != 0:
            assert self.process is not None
            assert self.process.poll() is None, self.logs()
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.2)
