"""Shared files: one side at a time, counts that outlive nobody, kills at any moment."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.kit.child import Child
from vllm_ssdkv.base.errors import SharedFileError
from vllm_ssdkv.node.shared_files import SIDES, References, SharedFiles, Side

OTHER: dict[Side, Side] = {"node": "host", "host": "node"}
PATIENCE_S = 60.0

HOLDER = """
import os, sys
from pathlib import Path
from vllm_ssdkv.node.shared_files import SharedFiles
with SharedFiles(Path(sys.argv[1]), sys.argv[2]).open("file", wait_s=float(sys.argv[3])):
    print("open", flush=True)
    sys.stdin.read()
"""
PARENT = """
import os, subprocess, sys
from pathlib import Path
from vllm_ssdkv.node.shared_files import SharedFiles
with SharedFiles(Path(sys.argv[1]), sys.argv[2]).open("file") as fd:
    no = subprocess.DEVNULL
    child = subprocess.Popen(["sleep", "600"], pass_fds=(fd,), stdout=no, stderr=no)
    print(child.pid, flush=True)
    sys.stdin.read()
"""
WALKER = """
import mmap, random, sys, time
from pathlib import Path
from vllm_ssdkv.base.errors import SharedFileError
from vllm_ssdkv.node.shared_files import SharedFiles
side, files = sys.argv[2], SharedFiles(Path(sys.argv[1]), sys.argv[2])
own, other = (0, 1) if side == "node" else (1, 0)
seen, draw = mmap.mmap(os.open(sys.argv[3], os.O_RDWR), 64), random.Random(sys.argv[4])
place, opened = own * 16 + int(sys.argv[4]), 0
print("ready", flush=True)
sys.stdin.readline()
end = time.monotonic() + 2
# One that the others never let in has its turn when they have ended.
while time.monotonic() < end or not opened:
    try:
        if draw.random() < 0.2:
            files.write("file", b"%08d" % draw.randrange(10**8))
            continue
        with files.open("file") as fd:
            seen[place] = 1
            assert not any(seen[other * 16 : other * 16 + 16]), "both sides at once"
            assert len(os.read(fd, 9)) == 8
            time.sleep(draw.random() / 1000)
            opened += 1
            seen[place] = 0
    except SharedFileError:
        time.sleep(draw.random() / 500)
print(opened)
""".replace("import mmap", "import mmap, os")


def start(code: str, *arguments: object) -> Child:
    return Child.python("-P", "-c", code, *arguments)


def holder(directory: Path, side: Side, wait_s: float = 0.0) -> Child:
    """A process that has the file open on a side until its input ends."""
    process = start(HOLDER, directory, side, wait_s)
    if wait_s == 0:
        assert process.hear() == "open"
    return process


def end(process: Child, by: int | None = None) -> None:
    if by is not None:
        process.send_signal(by)
    process.wait()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(b"00000000")
    return tmp_path


def can_open(directory: Path, side: Side) -> bool:
    try:
        with SharedFiles(directory, side).open("file"):
            return True
    except SharedFileError:
        return False


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("by", [None, signal.SIGTERM, signal.SIGKILL])
def test_one_side_has_it_until_its_process_ends(
    directory: Path, side: Side, by: int | None
) -> None:
    process = holder(directory, side)
    assert can_open(directory, side)
    assert not can_open(directory, OTHER[side])
    end(process, by)
    assert can_open(directory, OTHER[side])
    assert SharedFiles(directory, side).references("file") == References(0, 0)


def test_it_is_counted_on_a_side_and_the_last_one_gives_it_back(directory: Path) -> None:
    files = SharedFiles(directory, "node")
    first, second = holder(directory, "node"), holder(directory, "node")
    with files.open("file"):
        assert files.references("file") == References(node=3, host=0)
    end(first, signal.SIGKILL)
    assert files.references("file") == References(node=1, host=0)
    assert not can_open(directory, "host")
    end(second, signal.SIGKILL)
    assert can_open(directory, "host")


def test_who_waits_gets_it_when_the_other_side_is_killed(directory: Path) -> None:
    process = holder(directory, "node")
    waiting = holder(directory, "host", wait_s=PATIENCE_S)
    time.sleep(0.2)
    assert SharedFiles(directory, "host").references("file") == References(node=1, host=0)
    end(process, signal.SIGKILL)
    assert waiting.hear() == "open"
    assert not can_open(directory, "node")
    end(waiting)


def test_a_child_that_inherits_it_keeps_it(directory: Path) -> None:
    parent = start(PARENT, directory, "node")
    child = int(parent.hear())
    end(parent, signal.SIGKILL)
    assert not can_open(directory, "host")
    assert SharedFiles(directory, "host").references("file") == References(node=1, host=0)
    os.kill(child, signal.SIGKILL)
    with SharedFiles(directory, "host").open("file", wait_s=PATIENCE_S):
        pass


def test_it_is_not_replaced_while_it_is_open(directory: Path) -> None:
    host = SharedFiles(directory, "host")
    process = holder(directory, "node")
    for side in SIDES:
        with pytest.raises(SharedFileError, match="on the side of the node: stop"):
            SharedFiles(directory, side).write("file", b"other")
    assert (directory / "file").read_bytes() == b"00000000"
    end(process)
    host.write("file", b"other")
    host.write("new", b"content")
    with host.open("new", writable=True) as fd:
        os.pwrite(fd, b"C", 0)
    assert (directory / "new").read_bytes() == b"Content"
    assert (directory / "file").read_bytes() == b"other"


def test_what_a_killed_writer_left_is_in_nobodys_way(directory: Path) -> None:
    (directory / "file.tmp").write_bytes(b"half")
    SharedFiles(directory, "host").write("file", b"whole")
    assert [path.name for path in directory.iterdir()] == ["file"]
    assert (directory / "file").read_bytes() == b"whole"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc/passwd", ".hidden", "file.tmp"])
def test_names_stay_in_the_directory(directory: Path, name: str) -> None:
    with pytest.raises(SharedFileError, match="names no shared file"):
        SharedFiles(directory, "host").write(name, b"")
    with pytest.raises(SharedFileError), SharedFiles(directory, "host").open(name):
        pass


def test_a_link_is_not_followed(directory: Path) -> None:
    (directory / "link").symlink_to("file")
    with pytest.raises(OSError, match="symbolic"), SharedFiles(directory, "node").open("link"):
        pass


def test_both_sides_are_never_in_it_at_once(directory: Path) -> None:
    """Two processes a side, which open, replace and close at random."""
    seen = directory / "seen"
    seen.write_bytes(bytes(64))
    walkers = [
        start(WALKER, directory, side, seen, number) for side in SIDES for number in range(2)
    ]
    for walker in walkers:
        assert walker.hear() == "ready"
    for walker in walkers:
        walker.say("go")
    for walker in walkers:
        assert int(walker.hear()) > 0
        assert walker.wait() == 0


def test_kills_at_random_moments_leave_nothing_held(directory: Path) -> None:
    seen, draw = directory / "seen", random.Random(7)
    seen.write_bytes(bytes(64))
    for number in range(4):
        walker = start(WALKER, directory, SIDES[number % 2], seen, 0)
        assert walker.hear() == "ready"
        walker.say("go")
        time.sleep(draw.random() / 4)
        end(walker, signal.SIGKILL)
        seen.write_bytes(bytes(64))
        assert SharedFiles(directory, "host").references("file") == References(0, 0)
        for side in SIDES:
            with SharedFiles(directory, side).open("file") as fd:
                assert len(os.read(fd, 9)) == 8
