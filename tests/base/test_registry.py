import sys
from pathlib import Path
from typing import Protocol

import pytest

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.base.registry import Registry

GUESTS = """
class Good:
    version = 3
    def __init__(self, depth): ...
    @classmethod
    def of(cls, parts): return cls(1)
    def move(self, count, *, late): return count

class Wider(Good):
    version = "b7"
    def move(self, count, more=0, *, late, never=False): return count

class Static(Good):
    @staticmethod
    def move(count, *, late): return count

class Inherits(Static): pass

class NoMethod:
    version = 1
    def __init__(self, depth): ...
    @classmethod
    def of(cls, parts): ...

class OtherParameters(Good):
    def move(self): return 0

class OtherStart(Good):
    def __init__(self): ...

class NoVersion(Good):
    version = None

class Flag(Good):
    version = True

class Endless(Good):
    version = "7" * 65

number = 5
"""


class Mover(Protocol):
    @property
    def depth(self) -> int: ...

    def move(self, count: int, *, late: bool) -> int: ...


class Guest(Mover, Protocol):
    def __init__(self, depth: int) -> None: ...

    @classmethod
    def of(cls, parts: object) -> Mover: ...


@pytest.fixture
def guests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a module with guests, which nobody has imported yet."""
    (tmp_path / "guests_of_test.py").write_text(GUESTS)
    (tmp_path / "broken_of_test.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("guests_of_test", None)
    return "guests_of_test"


def movers(*, versioned: bool = True) -> Registry[Guest]:
    return Registry("io.mover", f"{__name__}:Guest", versioned=versioned)


def test_a_name_imports_nothing_until_it_is_asked_for(guests: str) -> None:
    registry = movers()
    registry.register("good", f"{guests}:Good")
    assert registry.names() == ("good",)
    assert guests not in sys.modules
    assert registry.resolve("good") is sys.modules[guests].Good


@pytest.mark.parametrize(("name", "version"), [("Good", "3"), ("Wider", "b7"), ("Inherits", "3")])
def test_a_guest_need_not_be_registered_and_has_a_version(
    guests: str, name: str, version: str
) -> None:
    registry, place = movers(), f"{guests}:{name}"
    assert registry.is_guest(place)
    assert registry.resolve(place).__name__ == name
    assert registry.version(place) == version


def test_a_class_of_this_package_has_no_version() -> None:
    registry = movers()
    registry.register("ours", "vllm_ssdkv.base.errors:ConfigError")
    assert not registry.is_guest("ours")
    assert registry.resolve("ours").__name__ == "ConfigError"
    assert registry.version("ours") is None


def test_at_its_place_it_is_a_guest_like_any_other() -> None:
    with pytest.raises(ConfigError, match="has no method"):
        movers().resolve("vllm_ssdkv.base.errors:ConfigError")


def test_a_registered_guest_is_a_guest(guests: str) -> None:
    registry = movers()
    registry.register("guest", f"{guests}:NoVersion")
    assert registry.is_guest("guest")
    with pytest.raises(ConfigError, match="states no version"):
        registry.resolve("guest")


@pytest.mark.parametrize("name", ["NoVersion", "Flag", "Endless"])
def test_a_version_is_needed_where_it_counts(guests: str, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^io\.mover: {guests}:{name} states no version; give"):
        movers().resolve(f"{guests}:{name}")
    assert movers(versioned=False).resolve(f"{guests}:{name}").__name__ == name


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("NoMethod", r"has no method move\(count, \*, late\); it needs those of .*:Guest"),
        ("OtherParameters", r"has no method move\(count, \*, late\)"),
        ("OtherStart", r"has no method __init__\(depth\)"),
        ("Absent", "the module guests_of_test has no class Absent"),
        ("number", "the module guests_of_test has no class number"),
    ],
)
def test_what_a_guest_lacks_is_named(guests: str, name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"^io\.mover: .*{text}"):
        movers().resolve(f"{guests}:{name}")


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("no_such_module:Class", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("broken_of_test:Class", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_module_that_fails_says_why(guests: str, place: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        movers().resolve(place)
    assert str(caught.value) == (
        f"io.mover: {place} cannot be imported ({text}); install its package, or put its folder on "
        "PYTHONPATH"
    )


@pytest.mark.parametrize("text", ["other", "", "a:b:c", "os;x:Y", "module.:Class", ":Class", "m:"])
def test_what_is_neither_a_name_nor_a_place_gets_the_names(text: str) -> None:
    registry = movers()
    registry.register("one", "a.b:C")
    registry.register("two", "a.b:D")
    with pytest.raises(ConfigError) as caught:
        registry.resolve(text)
    assert str(caught.value) == (
        f"io.mover: {text!r} is not registered; choose one of one, two, or give a class of your "
        "own as module:Class"
    )


def test_a_name_stands_for_one_class() -> None:
    registry = movers()
    registry.register("one", "a.b:C")
    registry.register("one", "a.b:C")
    with pytest.raises(ConfigError, match=r"'one' is registered as a\.b:C; give a\.b:D another"):
        registry.register("one", "a.b:D")


@pytest.mark.parametrize(("name", "place"), [("a:b", "a:B"), ("", "a:B"), ("a", "b")])
def test_a_registration_is_a_name_and_a_place(name: str, place: str) -> None:
    with pytest.raises(ConfigError, match="give a name and module:Class"):
        movers().register(name, place)
