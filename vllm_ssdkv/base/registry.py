"""Classes by name, ours and a guest's, imported when an option asks for them."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Final, Generic, TypeVar, cast

from vllm_ssdkv.base.errors import ConfigError

T = TypeVar("T")

_PLACE: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_OURS: Final = "vllm_ssdkv."
_MAX_VERSION: Final = 64
"""Characters of a version."""


class Registry(Generic[T]):
    """Classes that one option may name: ``register("bounds", "package.module:Class")``.

    Nothing is imported until :meth:`resolve` asks for it. A class that is not this package's own is
    a *guest*.

    Args:
        what: The option, for messages.
        protocol: ``module:Class`` of the protocol that the classes have. Its methods, and its
            ``__init__`` where it declares one, are compared with a guest's by name and parameters.
        versioned: Whether a guest states a ``version``, which is part of the identity of what is
            stored.
    """

    def __init__(self, what: str, protocol: str, *, versioned: bool = False) -> None:
        self._what = what
        self._protocol = protocol
        self._versioned = versioned
        self._places: dict[str, str] = {}

    def register(self, name: str, place: str) -> None:
        """Give the class at ``place``, ``module:Class``, a name.

        Raises:
            ConfigError: the name is taken by another class, or one of the two is malformed.
        """
        if not name.isidentifier() or not is_place(place):
            raise ConfigError(
                f"{self._what}: cannot register {name!r} as {place!r}: give a name and module:Class"
            )
        if self._places.setdefault(name, place) != place:
            raise ConfigError(
                f"{self._what}: {name!r} is registered as {self._places[name]}; give {place} "
                "another name"
            )

    def names(self) -> tuple[str, ...]:
        """Names in the order of their registration."""
        return tuple(self._places)

    def is_guest(self, text: str) -> bool:
        """Check whether ``text`` names a class that is not this package's own."""
        return not self._places.get(text, "").startswith(_OURS)

    def resolve(self, text: str) -> type[T]:
        """The class with the registered name ``text``, or at the place ``module:Class``.

        Raises:
            ConfigError: there is none, it cannot be imported, or it lacks what the protocol has; in
                one line, with the option and the remedy.
        """
        place = self._places.get(text, text)
        if not is_place(place):
            raise ConfigError(
                f"{self._what}: {text!r} is not registered; choose one of "
                f"{', '.join(self._places)}, or give a class of your own as module:Class"
            )
        found = self._imported(place)
        if self.is_guest(text):
            self._check(found, place)
        return cast("type[T]", found)

    def version(self, text: str) -> str | None:
        """Version that a guest states; None: the class is this package's own.

        Raises:
            ConfigError: as :meth:`resolve`.
        """
        if not self.is_guest(text):
            return None
        return str(getattr(self.resolve(text), "version", ""))

    def _imported(self, place: str) -> type:
        module, _, name = place.partition(":")
        try:
            found = getattr(importlib.import_module(module), name, None)
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            raise ConfigError(
                f"{self._what}: {place} cannot be imported ({text}); install its package, or put "
                "its folder on PYTHONPATH"
            ) from error
        if not isinstance(found, type):
            raise ConfigError(f"{self._what}: the module {module} has no class {name}")
        return found

    def _check(self, found: type, place: str) -> None:
        """Compare a guest with the protocol."""
        for name, wanted in _methods(self._imported(self._protocol)).items():
            if not _takes(found, name, wanted):
                raise ConfigError(
                    f"{self._what}: {place} has no method {name}{wanted}; it needs those of "
                    f"{self._protocol}"
                )
        if self._versioned and not _is_version(getattr(found, "version", None)):
            raise ConfigError(
                f"{self._what}: {place} states no version; give the class a number or a text, such "
                "as version = 1, and another one when it computes something else"
            )


def is_place(text: str) -> bool:
    """Check whether ``text`` has the form ``module:Class``."""
    return _PLACE.fullmatch(text) is not None


def _is_version(version: object) -> bool:
    if isinstance(version, str):
        return 0 < len(version) <= _MAX_VERSION
    return isinstance(version, int) and not isinstance(version, bool)


def _methods(protocol: type) -> dict[str, inspect.Signature]:
    """Methods of a protocol, and its ``__init__`` if it declares one, as they are called."""
    declared = [base for base in protocol.__mro__ if getattr(base, "_is_protocol", False)]
    names = {name for base in declared[:-1] for name in vars(base) if not name.startswith("_")}
    names |= {"__init__"} & vars(protocol).keys()
    found = {name: _signature(protocol, name) for name in sorted(names)}
    return {name: signature for name, signature in found.items() if signature is not None}


def _signature(owner: type, name: str) -> inspect.Signature | None:
    """Signature of a method without ``self`` and annotations; None: it is no method."""
    method = getattr(owner, name, None)
    if not inspect.isroutine(method):
        return None
    parameters = list(inspect.signature(method).parameters.values())
    is_bound = inspect.ismethod(method) or isinstance(
        inspect.getattr_static(owner, name), staticmethod
    )
    plain = [one.replace(annotation=one.empty) for one in parameters[not is_bound :]]
    return inspect.Signature(plain)


def _takes(guest: type, name: str, wanted: inspect.Signature) -> bool:
    """Check whether a guest's method can be called as ``wanted`` says."""
    own = _signature(guest, name)
    if own is None:
        return False
    parameters = wanted.parameters.values()
    places = [None for one in parameters if one.kind is not one.KEYWORD_ONLY]
    names = {one.name: None for one in parameters if one.kind is one.KEYWORD_ONLY}
    try:
        own.bind(*places, **names)
    except TypeError:
        return False
    return True
