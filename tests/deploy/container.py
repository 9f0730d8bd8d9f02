"""A container without a container runtime: the start-up path of an image, from its Containerfile.

A root file system of bind mounts, read-only but for the volumes, a process that is number 1 of its
own namespace, the user, the variables and the command of the image. Needs root.
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

from tests.deploy.manifests import as_list, environment, of_stage

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
mount -t tmpfs -o mode=0755 tmpfs "$root"
cd "$root"
mkdir -p proc dev tmp opt etc/ssdkv run var/lib
mount -t proc proc proc
mount -t tmpfs -o mode=1777 tmpfs tmp
for device in null zero urandom; do
  touch dev/$device
  mount --bind /dev/$device dev/$device
done
for folder in lib lib64 bin sbin; do
  if [ -L /$folder ]; then cp -P /$folder $folder; fi
done
readonly_bind() {
  mkdir -p ".$1"
  mount --rbind "$1" ".$1"
  mount -o remount,bind,ro ".$1"
}
for folder in $folders; do readonly_bind "$folder"; done
for package in $hidden; do
  if [ -d ".$package" ]; then mount -t tmpfs -o ro tmpfs ".$package"; fi
done
ln -s "$prefix" opt/ssdkv
touch ".$config"
mount --bind "$options" ".$config"
mount -o remount,bind,ro ".$config"
for volume in $volumes; do
  mkdir -p "./$volume"
  mount --bind "$store/$volume" "./$volume"
done
mount -o remount,ro,mode=0755 .
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


class Container:
    """One container of an image of ``deploy/Containerfile``, with volumes in a folder.

    Attributes:
        process: What runs it; its first child is number 1 in there.
        log: File with what it prints.
    """

    def __init__(self, folder: Path, store: Path, options: Path) -> None:
        """Create it. Nothing runs, and nothing is written to its volumes but their owner."""
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
