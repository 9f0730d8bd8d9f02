"""Removing a store: all of it, nothing else, and never one that is used."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from tests.store.conftest import PAGED
from tests.store.filled_store import RANKS, FilledStore, flip, loop_devices
from tests.store.opening import MODEL, close
from vllm_ssdkv.base.errors import SSDKVError, StoreError, StoreLockedError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.store.devices.manifest_copies import read_copy, write_copy
from vllm_ssdkv.store.devices.owner import DATA_NAME, files_named_alike, owner_of, owners_of_data
from vllm_ssdkv.store.format.journal_record import encode_header
from vllm_ssdkv.store.format.manifest import COPY, NAME, Manifest, ManifestDevice, sealed
from vllm_ssdkv.store.format.superblock import BLOCK_BYTES, COPY_OFFSETS, Superblock
from vllm_ssdkv.store.location import choose_state, locate
from vllm_ssdkv.store.maintenance import remove as removing
from vllm_ssdkv.store.maintenance.remove import Removal, plan_left_over, plan_removal, remove
from vllm_ssdkv.store.open import JOURNAL, open_index, open_rank


@pytest.fixture
def store(tmp_devices: Callable[[int], list[Path]]) -> FilledStore:
    *devices, state = tmp_devices(3)
    store = FilledStore(tuple(devices), state, (0, 1, 2))
    store.fill()
    return store


@pytest.fixture
def other(tmp_devices: Callable[[int], list[Path]]) -> FilledStore:
    """Another store, elsewhere."""
    *devices, state = tmp_devices(3)
    store = FilledStore(tuple(devices), state, (0, 1, 2))
    store.fill()
    return store


def content(store: FilledStore) -> set[Path]:
    return {file for place in (*store.devices, store.state) for file in place.iterdir()}


def name_of(store: FilledStore) -> str:
    found = owner_of(store.state / NAME)
    assert found is not None
    return found


def test_all_of_it_goes_and_nothing_else(store: FilledStore) -> None:
    theirs = [
        store.devices[0] / "rank0.data.bak",
        store.state / "notes",
        store.devices[1] / "rankx.data",
    ]
    for file in theirs:
        file.write_text("mine")
    (store.state / "journal.rejected").touch()
    (store.state / "store.json.tmp").touch()
    (store.state / "wear.json").touch()
    found = plan_removal(store.devices, store.state)
    assert (found.store, found.model) == (name_of(store), "some/model")
    assert found.last_opened > 0
    assert len(found.files) == 2 * (RANKS + 1) + len((NAME, COPY, "journal")) + 3
    assert found.files[-1] == store.state / NAME, "the manifest goes last"
    assert {file.name for file in found.files[: 2 * RANKS]} == {"rank0.data", "rank1.data"}
    assert found.nbytes == sum(f.stat().st_blocks * 512 for f in found.files)
    assert (found.raw, found.missing, found.kept) == ((), (), ())
    remove(found)
    assert content(store) == set(theirs)
    with pytest.raises(StoreError, match=NAME):
        plan_removal(store.devices, store.state)
    store.fill()  # the directories are as good as new
    assert store.served() == {0, 1, 2}


@pytest.mark.parametrize("how", ["by its state directory", "one of several devices", "links"])
def test_devices_that_say_they_belong_to_it_need_no_name(
    store: FilledStore, tmp_path: Path, how: str
) -> None:
    named = [store.state]
    if how == "one of several devices":
        named.append(store.devices[0])
    elif how == "links":
        named = [tmp_path / "link", store.state]
        named[0].symlink_to(store.state)
    remove(plan_removal(named))
    assert content(store) == set()


def test_a_store_in_use_stays_whole(store: FilledStore) -> None:
    found, before = plan_removal([], store.state), content(store)
    opened = open_rank(store.place, 1, Counters())
    with pytest.raises(StoreLockedError, match="in use"):
        remove(found)
    close(opened)
    index, _ = open_index(store.place)
    with pytest.raises(StoreLockedError, match="in use"):
        remove(found)
    index.close()
    assert content(store) == before
    assert store.served() == {0, 1, 2}


def test_an_interrupted_removal_can_be_started_again(store: FilledStore) -> None:
    files = plan_removal([], store.state).files
    for count in (1, 3, 5, 6, len(files) - 1):
        for file in files[:count]:
            file.unlink(missing_ok=True)
        left = plan_removal([], store.state)
        assert set(left.files) == set(files[count:])
    remove(left)
    assert content(store) == set()


def test_a_device_that_is_away_is_named(store: FilledStore) -> None:
    away = store.devices[1].with_name("away")
    store.devices[1].rename(away)
    found = plan_removal([], store.state)
    assert found.missing == (store.devices[1],)
    remove(found)
    assert files_named_alike(store.devices[0]) == files_named_alike(store.state) == []
    assert len(files_named_alike(away)) == RANKS + 1


# ---- whose is it ----


def refused(before: set[Path], store: FilledStore, text: str, *named: Path) -> None:
    with pytest.raises(StoreError, match=text):
        plan_removal(named)
    assert content(store) == before


def test_a_backup_of_the_state_is_not_the_store(store: FilledStore, tmp_path: Path) -> None:
    backup = tmp_path / "backup"
    shutil.copytree(store.state, backup)
    before = content(store)
    refused(before, store, "may be a copy or a backup, and nothing was removed", backup)
    # Also where it is mounted in the place of the original.
    original = store.state.with_name("original")
    assert store.served() == {0, 1, 2}
    store.state.rename(original)
    backup.rename(store.state)
    refused(set(content(store)), store, "may be a copy or a backup", store.state)
    shutil.rmtree(store.state)
    original.rename(store.state)
    assert store.served() == {0, 1, 2}


def test_a_copied_store_is_not_the_original(store: FilledStore, tmp_path: Path) -> None:
    copies = [tmp_path / place.name for place in (*store.devices, store.state)]
    for place, copy in zip((*store.devices, store.state), copies, strict=True):
        shutil.copytree(place, copy)
    before = content(store)
    for named in ([copies[-1]], copies[1:], [copies[-1], copies[0]]):
        refused(before, store, "name them: ", *named)
    remove(plan_removal(copies))
    assert [list(copy.iterdir()) for copy in copies] == [[], [], []]
    assert content(store) == before
    assert store.served() == {0, 1, 2}


def test_a_store_that_was_moved_is_named_whole(store: FilledStore, tmp_path: Path) -> None:
    state = store.state.rename(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="name them: ") as refusal:
        plan_removal([state])
    named = [Path(p) for p in str(refusal.value).split("name them: ")[1].split(". ")[0].split()]
    assert named == list(store.devices)
    remove(plan_removal([*named, state]))
    assert content(replace(store, state=state)) == set()


def test_a_drive_that_was_given_to_another_store_stays(store: FilledStore, tmp_path: Path) -> None:
    """The old store's state directory is cleaned up."""
    for file in store.devices[0].iterdir():
        file.unlink()
    state = tmp_path / "new"
    state.mkdir()
    new = FilledStore(store.devices[:1], state, (0, 1, 2))
    new.fill()
    before = content(new)
    found = plan_removal([store.state])
    assert found.kept == (removing.Kept(store.devices[0], f"it is of the store {name_of(new)}"),)
    remove(found)
    assert content(new) == before
    assert list(store.devices[1].iterdir()) == list(store.state.iterdir()) == []
    assert new.served() == {0, 1, 2}


def test_two_stores_are_never_named_as_one(store: FilledStore, other: FilledStore) -> None:
    before = content(store) | content(other)
    for named in (
        [store.devices[0], other.devices[1], store.state],
        [*store.devices, store.state, other.devices[0]],
    ):
        with pytest.raises(StoreError, match=f"holds data of the store {name_of(other)}, not of"):
            plan_removal(named)
    assert content(store) | content(other) == before


def test_a_second_drive_alone_is_no_store(store: FilledStore) -> None:
    before = content(store)
    refused(before, store, f"state directory of this store is {store.state}", store.devices[1])
    away = store.state.rename(store.state.with_name("unmounted"))
    text = f"ssdkv rm --left-over {owners_of_data(store.devices[1]).pop()} {store.devices[1]}"
    with pytest.raises(StoreError, match=text):
        plan_removal([store.devices[1]])
    away.rename(store.state)
    assert content(store) == before


@pytest.mark.parametrize("state", ["state", "first device"])
def test_without_a_manifest_that_can_be_read(
    tmp_devices: Callable[[int], list[Path]], other: FilledStore, state: str
) -> None:
    """Superblocks say which store it is, and devices that are not named stay."""
    *devices, last = tmp_devices(3)
    where = last if state == "state" else devices[0]
    store = FilledStore(tuple(devices), where, (0, 1, 2))
    store.fill()
    for place in {*devices, where}:
        for name in (NAME, COPY):
            if (place / name).exists():
                flip(place / name, 5)
    found = plan_removal([devices[0], where])
    assert found.store in owners_of_data(devices[1])
    remove(found)
    assert content(store) == set(devices[1].iterdir())
    assert len(content(store)) == RANKS + 1
    # What tells nothing, or of two stores, is for people.
    flip(other.state / NAME, 5)
    (other.state / COPY).unlink()
    (other.state / JOURNAL).unlink()
    with pytest.raises(StoreError, match="the other files name none"):
        plan_removal([other.state])
    with pytest.raises(StoreError, match=r"the other files name .* and "):
        plan_removal([other.state, other.devices[0], devices[1]])


def test_a_document_that_is_called_like_ours_stays(tmp_path: Path) -> None:
    files = [tmp_path / name for name in (NAME, "journal", "rank0.data", "wear.json")]
    for file in files:
        file.write_text('{"store": "of a shop"}')
    with pytest.raises(StoreError, match="cannot be told which store"):
        plan_removal([tmp_path])
    assert all(file.exists() for file in files)


def test_what_only_looks_like_a_part_of_it_stays(
    store: FilledStore, other: FilledStore, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    data = store.data(0, 0)
    victim.write_bytes(data.read_bytes())
    data.unlink()
    data.symlink_to(victim)
    damaged = store.data(1, 0)
    for offset in COPY_OFFSETS:
        flip(damaged, offset + 9)
    leftover = store.devices[1] / "rank7.data"
    shutil.copyfile(other.data(0, 1), leftover)
    theirs = store.state / "journal.rejected"
    shutil.copyfile(other.state / JOURNAL, theirs)
    os.mkfifo(store.devices[0] / "rank9.data")
    found = plan_removal(store.devices, store.state)
    assert {kept.path: kept.why.split(": ")[-1] for kept in found.kept} == {
        data: "it is a symbolic link",
        store.devices[0] / "rank9.data": "it is not a regular file",
        damaged: "it has no whole superblock, so nobody knows whose it is",
        leftover: f"it is of the store {name_of(other)}",
        theirs: f"it is of the store {name_of(other)}",
    }
    remove(found)
    assert content(store) == {kept.path for kept in found.kept}
    assert victim.exists()


def test_a_superblock_of_another_version_names_its_store_too(store: FilledStore) -> None:
    """Its manifest is refused by this release, and it can be removed."""
    text = (store.state / NAME).read_bytes().replace(b'"version": 5', b'"version": 9')
    for place in (store.state, *store.devices):
        (place / COPY).write_bytes(sealed(text))
    (store.state / NAME).write_bytes(sealed(text))
    remove(plan_removal([*store.devices, store.state]))
    assert content(store) == set()


def test_what_changes_before_the_answer_is_looked_at_again(
    store: FilledStore, other: FilledStore
) -> None:
    found = plan_removal(store.devices, store.state)
    data = store.data(1, 1)
    data.unlink()
    shutil.copyfile(other.data(1, 1), data)
    before = content(store)
    with pytest.raises(StoreError, match=f"{data} has changed meanwhile, nothing was removed"):
        remove(found)
    assert content(store) == before


# ---- what is left over ----


def test_what_a_removed_store_left_on_a_drive_that_was_away(store: FilledStore) -> None:
    name = name_of(store)
    away = store.devices[1].rename(store.devices[1].with_name("away"))
    remove(plan_removal([store.state]))
    away.rename(store.devices[1])
    theirs = store.devices[1] / "rank7.data"
    theirs.write_bytes(b"mine" * 1000)
    found = plan_left_over([store.devices[1]], name)
    assert (found.store, found.model) == (name, "some/model")
    assert found.nbytes > 0
    remove(found)
    assert content(store) == {theirs}
    with pytest.raises(StoreError, match=f"nothing of the store {name} is there"):
        plan_left_over([store.devices[1]], name)


def test_the_second_drive_of_a_store_that_is_there_is_no_left_over(
    store: FilledStore, other: FilledStore
) -> None:
    before, name = content(store), name_of(store)
    for places, text in (
        ([store.devices[1]], f"the store {name} is in {store.state} still: .*ssdkv rm"),
        ([store.state], "is the state directory of the store"),
        ([other.devices[1]], f"nothing of the store {name} is there: there is data of "),
        ([store.devices[1] / "nowhere"], "does not exist: is it mounted"),
    ):
        with pytest.raises(StoreError, match=text):
            plan_left_over(places, name)
    with pytest.raises(StoreError, match=f"no UUID of a store: there is data of {name}"):
        plan_left_over([store.devices[1]], str(store.devices[1]))
    # Without its state directory a start would go on with the other drives.
    shutil.rmtree(store.state)
    before = {file for device in store.devices for file in device.iterdir()}
    with pytest.raises(StoreError, match=f"has data on {store.devices[0]}, too"):
        plan_left_over([store.devices[1]], name)
    assert {file for device in store.devices for file in device.iterdir()} == before
    remove(plan_left_over(store.devices, name))
    assert not any(file for device in store.devices for file in device.iterdir())


# ---- block devices ----


@pytest.fixture
def raw(tmp_path: Path) -> Iterator[FilledStore]:
    with loop_devices(tmp_path, 2) as devices:
        state = tmp_path / "state"
        state.mkdir()
        store = FilledStore(tuple(devices), state, (0, 1, 2), ranks=1)
        store.fill()
        yield store


def test_a_raw_device_is_as_new(raw: FilledStore, tmp_path: Path) -> None:
    """Superblocks and manifests of ours are zeros then; those of another store stay."""
    backup = tmp_path / "backup"
    shutil.copytree(raw.state, backup)
    with pytest.raises(StoreError, match="may be a copy or a backup"):
        plan_removal([backup])
    found = plan_removal([raw.state])
    assert found.raw == raw.devices
    before = raw.devices[0].read_bytes()
    remove(found)
    after = raw.devices[0].read_bytes()
    for offset in COPY_OFFSETS:
        assert after[offset : offset + 2 * BLOCK_BYTES] == bytes(2 * BLOCK_BYTES)
    assert after[2 * COPY_OFFSETS[1] :] == before[2 * COPY_OFFSETS[1] :]
    assert read_copy(raw.devices[0]) is None
    # They are another store's now.
    state = tmp_path / "new"
    state.mkdir()
    new = replace(raw, state=state)
    new.fill()
    found = plan_removal([*raw.devices, state])
    backup.rename(raw.state.with_name("again"))
    left = plan_removal([raw.state.with_name("again")])
    assert left.raw == ()
    assert {kept.path for kept in left.kept} == set(raw.devices)
    with raw.devices[0].open("r+b") as device:
        device.write(bytes(BLOCK_BYTES))
    remove(found)


def test_a_raw_device_that_has_changed_hands_is_not_wiped(raw: FilledStore) -> None:
    found = plan_removal([raw.state])
    manifest = Manifest.load(raw.state)
    assert manifest is not None
    for offset in COPY_OFFSETS:
        flip(raw.devices[1], offset + 20)
    before = raw.devices[1].read_bytes()
    with pytest.raises(StoreError, match="has changed meanwhile, nothing was removed"):
        remove(found)
    assert raw.devices[1].read_bytes() == before
    assert (raw.state / NAME).exists()


# ---- random arrangements of stores ----


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
        manifest = Manifest.create(MODEL, [PAGED] * RANKS, "a/model")
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
