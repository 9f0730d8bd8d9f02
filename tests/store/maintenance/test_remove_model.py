"""Random arrangements of stores, copies and backups: nothing that was not named is ever touched.

Every directory is of one *instance* of a store. A copy or a backup of it is another instance, with
the same UUID, the same content and the same paths inside, and so is what lies on a drive that was
given away. What a removal takes must be in a directory that was named, or of the same instance as
the state directory that was, and carry the name of its store.
"""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from tests.store.conftest import PAGED
from tests.store.filled_store import flip
from tests.store.opening import MODEL
from vllm_ssdkv.base.errors import SSDKVError
from vllm_ssdkv.store.devices.manifest_copies import write_copy
from vllm_ssdkv.store.devices.owner import DATA_NAME, owner_of
from vllm_ssdkv.store.format.journal_record import encode_header
from vllm_ssdkv.store.format.manifest import COPY, NAME, Manifest, ManifestDevice
from vllm_ssdkv.store.format.superblock import BLOCK_BYTES, COPY_OFFSETS, Superblock
from vllm_ssdkv.store.location import choose_state, locate
from vllm_ssdkv.store.maintenance.remove import Removal, plan_left_over, plan_removal, remove

RANKS = 2


@dataclass
class World:
    """Directories by their paths, and the instance that each is of; None: of nobody."""

    root: Path
    instance: dict[Path, int | None] = field(default_factory=dict)
    stores: dict[int, str] = field(default_factory=dict)
    """UUID of each instance's store."""
    gone: list[Path] = field(default_factory=list)
    """Not mounted now."""
    count: int = 0

    def fresh(self, instance: int | None = None) -> Path:
        self.count += 1
        path = self.root / f"m{self.count}" / "kv"
        path.mkdir(parents=True)
        self.instance[path] = instance
        return path

    def another(self, store: str) -> int:
        number = len(self.stores)
        self.stores[number] = store
        return number

    def of(self, instance: int) -> list[Path]:
        return [path for path, one in self.instance.items() if one == instance]

    # ---- what people do ----

    def make(self, devices: int, apart: bool, used: Path | None = None) -> None:
        """A new store, the first device of which may be a drive that had another one."""
        name = str(uuid.UUID(int=len(self.stores) + 1, version=4))
        instance = self.another(name)
        paths = [used] if used is not None else []
        paths += [self.fresh() for _ in range(devices - len(paths))]
        for path in paths:
            for file in path.iterdir():
                file.unlink()
            self.instance[path] = instance
        manifest = Manifest.create(MODEL, PAGED, RANKS, "a/model")
        manifest.store = name
        for path in paths:
            files = [str(uuid.uuid4()) for _ in range(RANKS)]
            manifest.devices.append(
                ManifestDevice(path=str(path), capacity=1 << 24, weight=1, files=files)
            )
            for rank, file in enumerate(files):
                superblock(path / f"rank{rank}.data", name, file, rank)
        manifest.numbers = 1
        state = self.fresh(instance) if apart else paths[0]
        (state / "journal").write_bytes(encode_header(uuid.UUID(name), MODEL.digest))
        (state / "wear.json").write_text("{}")
        self.save(manifest, state)

    def save(self, manifest: Manifest, state: Path) -> None:
        manifest.save(state)
        for device in manifest.devices:
            path = Path(device.path)
            if path.exists() and path != state:
                write_copy(path, manifest)

    def reopen(self, path: Path) -> None:
        """An engine starts: what it saves is newer."""
        state = choose_state([path])
        if state is None:
            return
        with suppress(SSDKVError):
            manifest = Manifest.load(state)
            if manifest is None or manifest.state != str(state):
                return
            devices = [Path(device.path) for device in manifest.devices]
            found = locate(state, devices).manifest
            if found is not None and found.store == manifest.store:
                self.save(found, state)

    def copy(self, path: Path, *, whole: bool) -> None:
        """A copy of a directory, or of all of its store."""
        instance = self.instance[path]
        if instance is None:
            return
        twin = self.another(self.stores[instance])
        for place in self.of(instance) if whole else [path]:
            if place.exists():
                shutil.copytree(place, self.fresh(twin), dirs_exist_ok=True)

    def swap(self, one: Path, other: Path) -> None:
        """Each is mounted where the other one was."""
        spare = self.root / "spare"
        one.rename(spare)
        other.rename(one)
        spare.rename(other)
        self.instance[one], self.instance[other] = self.instance[other], self.instance[one]

    def unmount(self, path: Path) -> None:
        path.parent.rename(path.parent.with_name(f"away{path.parent.name}"))
        self.gone.append(path)

    def damage(self, path: Path, which: int) -> None:
        names = (NAME, COPY, "journal", "rank0.data")
        file = path / names[which % len(names)]
        if file.exists() and file.stat().st_size > 40:
            flip(file, 30)
            if DATA_NAME.fullmatch(file.name):
                flip(file, COPY_OFFSETS[1] + 30)

    def files(self) -> dict[Path, tuple[int | None, str | None]]:
        """Every file that is there, its instance, and the store that it names."""
        found: dict[Path, tuple[int | None, str | None]] = {}
        for path, instance in self.instance.items():
            for file in path.iterdir() if path.exists() else ():
                named = None
                if file.name != "wear.json":
                    with suppress(OSError):
                        named = owner_of(file)
                found[file] = (instance, named)
        return found


def superblock(path: Path, store: str, device: str, rank: int) -> None:
    block = Superblock(
        store=uuid.UUID(store),
        device=uuid.UUID(device),
        rank=rank,
        unit_bytes=PAGED.unit_bytes,
        epoch=2,
        geometry=PAGED,
        fingerprint=MODEL,
    )
    with path.open("wb") as file:
        for offset in COPY_OFFSETS:
            file.seek(offset)
            file.write(block.encode())
        file.truncate(COPY_OFFSETS[1] + 2 * BLOCK_BYTES)


@contextmanager
def world() -> Iterator[World]:
    with tempfile.TemporaryDirectory(prefix="ssdkv-rm-") as root:
        yield World(Path(root))


def build(draw: st.DataObject, here: World) -> None:
    number = st.integers(0, 99)
    for _ in range(draw.draw(st.integers(1, 2))):
        here.make(draw.draw(st.integers(1, 3)), draw.draw(st.booleans()))
    for _ in range(draw.draw(st.integers(0, 6))):
        there = [path for path in here.instance if path not in here.gone]
        path = there[draw.draw(number) % len(there)]
        other = there[draw.draw(number) % len(there)]
        match draw.draw(st.sampled_from(list(STEPS))):
            case "backup":
                here.copy(path, whole=False)
            case "copy":
                here.copy(path, whole=True)
            case "give away":
                here.make(draw.draw(st.integers(1, 2)), draw.draw(st.booleans()), path)
            case "swap":
                if path != other:
                    here.swap(path, other)
            case "unmount":
                if len(there) > 1:
                    here.unmount(path)
            case "damage":
                here.damage(path, draw.draw(number))
            case "reopen":
                here.reopen(path)
            case "link":
                link = here.root / f"link{len(list(here.root.iterdir()))}"
                link.symlink_to(path)


STEPS = ("backup", "copy", "give away", "swap", "unmount", "damage", "reopen", "link")


def planned(draw: st.DataObject, here: World) -> tuple[list[Path], Removal | None]:
    """Places that somebody names, and files that would go; None: it is refused."""
    number = st.integers(0, 99)
    links = sorted(here.root.glob("link*"))
    known = [*here.instance, *links]
    named = [known[draw.draw(number) % len(known)] for _ in range(draw.draw(st.integers(1, 4)))]
    how = draw.draw(st.sampled_from(("devices", "state", "left over")))
    try:
        if how == "left over":
            name = here.stores[draw.draw(number) % len(here.stores)]
            return named, plan_left_over(named, name)
        if how == "state":
            return named, plan_removal(named[1:], named[0])
        return named, plan_removal(named)
    except SSDKVError:
        return named, None


@given(draw=st.data())
def test_nothing_that_was_not_named_is_touched(draw: st.DataObject) -> None:
    with world() as here:
        build(draw, here)
        before = here.files()
        named, removal = planned(draw, here)
        if removal is None:
            event("refused")
            assert here.files() == before
            return
        places = {path.resolve() for path in named}
        mine: set[int | None] = set()
        if removal.state is not None:
            assert removal.state.resolve() in places
            mine = {here.instance[removal.state.resolve()]}
        assert here.files() == before, "a plan changes nothing"
        try:
            remove(removal)
        except SSDKVError:
            event("failed")
            assert here.files() == before
            return
        gone = before.keys() - here.files().keys()
        event("removed something" if gone else "removed nothing")
        assert gone == set(map(Path.resolve, removal.files))
        for file in gone:
            instance, name = before[file]
            if DATA_NAME.fullmatch(file.name):
                assert name == removal.store, "its superblock says so"
            assert name in (removal.store, None)
            assert file.parent in places or instance in mine, "somebody else's"


@pytest.mark.parametrize("apart", [True, False])
def test_a_store_by_itself_goes_whole(apart: bool) -> None:
    """The property above would hold for a command that removes nothing, too."""
    with world() as here:
        here.make(3, apart)
        here.make(2, not apart)
        state = next(p for p, i in here.instance.items() if i == 0 and (p / NAME).exists())
        remove(plan_removal([state]))
        left = {instance for instance, _ in here.files().values()}
        assert left == {1}
