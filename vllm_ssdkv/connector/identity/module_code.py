"""Identity of the code that a model's modules run: hooks, replaced methods and remote code.

vLLM's version is part of every key, so code that vLLM or this package puts on a module needs no
digest. Code of another installed package is named, with the package's version. All other code is
digested by its bytecode and constants, and by the values that it reads: defaults, variables of
enclosing functions, globals, and the functions that it calls. If one of these values is a tensor or
another object, nothing tells the code from other code in a later process.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import logging
import sys
import sysconfig
import types
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn.modules import module as torch_module
from torch.utils._contextlib import _DecoratorContextManager

Plain = Callable[[object], str | None]
"""Function that returns a value's text if every process gives it the same one, else None."""

_TRUSTED: Final = frozenset({"vllm", "vllm_ssdkv"})
"""Packages whose code on a module follows from their version and the model's settings."""

_PYTHON: Final = "python"
"""Package that Python's own modules count as."""

_OF_VLLM: Final = _TRUSTED | {"torch", _PYTHON}
"""Packages whose classes a version of vLLM fixes."""

_GLOBAL_HOOKS: Final = torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks
"""Hooks that torch calls for every module."""

_PARTS: Final = ("impl", "quant_method")
"""Attributes that hold objects to which vLLM's modules delegate their work."""

_OF_COMPILING: Final = ("_compiled", "aot_compiled")
"""Beginnings of the names of attributes that hold compiled forms of methods."""

_MAIN: Final = ("__main__", "__mp_main__")
"""Names of the modules of code that users send to a worker, whose own module is another one."""

_DEEPEST: Final = 8
"""Number of wrappers around each other that are looked into."""

_LONGEST: Final = 64
"""Number of values in a list that are described."""

_WRAPPERS: Final = functools.partial, types.MethodType, staticmethod, classmethod, property
_FUNCTIONS: Final = types.FunctionType, functools.partial, types.MethodType


class _UnstableError(Exception):
    """Raised for a value that has no description that holds in every process."""


class ModelCode:
    """Describes the code of the modules of one model, in lines for a digest."""

    def __init__(self, plain: Plain):
        """``plain``: text of settings and other values that code reads."""
        self._plain = plain
        self._classes: dict[type, list[str]] = {}
        self.unstable: list[str] = []
        """Code that a later digest cannot identify; its lines equal no other ones."""

    def shared(self) -> list[str]:
        """Describe the hooks that torch calls for every module."""
        return [
            line for hooks in _GLOBAL_HOOKS for line in self._hooks("hook of all modules", hooks)
        ]

    def lines(self, place: str, module: torch.nn.Module) -> list[str]:
        """Describe the hooks and methods of a module, and its class if that is remote code.

        ``place``: path of the module in the model.
        """
        lines = []
        for kind, hooks in zip(("before", "after"), _hooks_of(module), strict=True):
            lines += self._hooks(f"hook {kind} {place}", hooks, module)
        lines += self._attributes(place, module, module)
        lines += [f"{place} {line}" for line in self._of_class(type(module))]
        for name in _PARTS:
            part = vars(module).get(name)
            if part is not None and not isinstance(part, torch.nn.Module):
                lines += self._attributes(f"{place}.{name}", module, part)
                lines += [f"{place}.{name} {line}" for line in self._of_class(type(part))]
        return lines

    def _hooks(
        self, place: str, hooks: Mapping[int, object], module: torch.nn.Module | None = None
    ) -> list[str]:
        return [self._line(place, hook, module) for hook in hooks.values() if not _is_trusted(hook)]

    def _attributes(self, place: str, module: torch.nn.Module, holder: object) -> list[str]:
        """Describe methods that were put on an object in place of those of its class.

        Remote code puts functions on its own objects: these are described as its classes are.
        """
        lines = []
        remote = _package(type(holder)) is None
        for name, value in sorted(getattr(holder, "__dict__", {}).items()):
            if name == "forward":
                lines.append(self._line(f"{place}.{name}", value, module))
            elif name.startswith(_OF_COMPILING) or not _is_foreign(value):
                continue
            elif not remote or isinstance(value, _FUNCTIONS):
                lines.append(self._line(f"{place}.{name}", value, module, strict=not remote))
        return lines

    def _of_class(self, kind: type) -> list[str]:
        if kind not in self._classes:
            lines = []
            forward = getattr(kind, "forward", torch.nn.Module.forward)
            if forward is not torch.nn.Module.forward and not _is_method(forward, kind):
                lines.append(f"runs {_name(forward)}")
            for owner in kind.__mro__[:-1]:
                package = _package(owner)
                if package is None:
                    lines.append(self._line(owner.__qualname__, owner, strict=False))
                    continue
                if package not in _OF_VLLM:
                    lines.append(_name(owner))
                lines += [
                    self._line(f"{owner.__qualname__}.{name}", value)
                    for name, value in sorted(vars(owner).items())
                    if isinstance(value, (types.FunctionType, *_WRAPPERS)) and _is_foreign(value)
                ]
            self._classes[kind] = lines
        return self._classes[kind]

    def _line(
        self,
        place: str,
        value: object,
        module: torch.nn.Module | None = None,
        *,
        strict: bool = True,
    ) -> str:
        try:
            found = _Describer(self._plain, strict=strict, module=module).of(value)
        except (_UnstableError, RecursionError):
            self.unstable.append(place)
            found = str(uuid.uuid4())
        return f"{place} {found}"


class CodeProbe:
    """Remembers hooks and ``forward`` methods of modules, and finds whether any has changed.

    A look takes less than a millisecond for 1,000 modules. Modules are not kept alive.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]):
        """``modules``: all modules of a model."""
        self._modules = [weakref.ref(module) for module in modules]
        self._seen = self._look()

    def changed(self) -> bool:
        """Check whether a module is gone, or runs other hooks or another ``forward``."""
        found = self._look()
        return len(found) != len(self._seen) or any(
            one is not other for one, other in zip(found, self._seen, strict=True)
        )

    def _look(self) -> list[object]:
        found: list[object] = [hook for hooks in _GLOBAL_HOOKS for hook in hooks.values()]
        for ref in self._modules:
            module = ref()
            if module is None:
                found.append(None)
                continue
            for hooks in _hooks_of(module):
                found += hooks.values()
            found.append(vars(module).get("forward") or getattr(type(module), "forward", None))
        return found


def _hooks_of(module: torch.nn.Module) -> tuple[Mapping[int, object], Mapping[int, object]]:
    own = vars(module)
    return own.get("_forward_pre_hooks", {}), own.get("_forward_hooks", {})


class _Describer:
    """Describes one value by what it does, with the same text in every process.

    ``strict``: a value without such a text is an error. Otherwise its type stands for it, because
    the modules of remote code hold loggers, locks and caches.
    """

    def __init__(self, plain: Plain, *, strict: bool, module: torch.nn.Module | None = None):
        """``module``: the one that runs the code; the model's digest has its content."""
        self._plain, self._strict, self._module = plain, strict, module
        self._seen: set[object] = set()
        self._kinds: tuple[tuple[type | tuple[type, ...], Callable[[Any], str]], ...] = (
            (types.FunctionType, self._of_function),
            (_WRAPPERS, self._of_wrapper),
            (types.BuiltinFunctionType, self._of_builtin),
            (type, self._of_type),
            (types.ModuleType, lambda module: str(module.__name__)),
            (_DecoratorContextManager, self._of_context),
        )

    def of(self, value: object) -> str:
        """Describe a value.

        Raises:
            _UnstableError: the value has no such text.
        """
        for kinds, describe in self._kinds:
            if isinstance(value, kinds):
                return describe(value)
        if value is not None and value is self._module:
            return "self"
        if isinstance(value, str):
            return repr(value)
        cache = isinstance(value, dict) and not self._strict
        text = None if cache else self._plain(value)
        if text is None and isinstance(value, list | tuple) and len(value) <= _LONGEST:
            return str(self._all(value))
        if text is None:
            if self._strict and not isinstance(value, logging.Logger):
                raise _UnstableError
            text = type(value).__qualname__
        return text

    def _all(self, values: Iterable[object]) -> list[str]:
        return [self.of(value) for value in values]

    def _of_wrapper(self, value: object) -> str:
        if isinstance(value, functools.partial):
            keywords = value.keywords
            return f"{self.of(value.func)} {self._all(value.args)} {sorted(keywords)} " + str(
                self._all(keywords[name] for name in sorted(keywords))
            )
        if isinstance(value, types.MethodType):
            of_self = "" if _is_trusted(value) else self.of(value.__self__)
            return f"{self.of(value.__func__)} {of_self}"
        return str(self._all(_inside(value)))

    def _of_context(self, value: _DecoratorContextManager) -> str:
        """Describe what a decorator of torch's, such as ``torch.no_grad()``, puts around calls."""
        return f"{_name(type(value))} {self._all(vars(value).values())}"

    def _of_builtin(self, value: types.BuiltinFunctionType) -> str:
        return f"{_name(value)} {self.of(value.__self__)}"

    def _of_function(self, function: types.FunctionType) -> str:
        if function in self._seen or _is_trusted(function):
            return _name(function)
        self._seen.add(function)
        names = sorted(_names(function.__code__))
        enclosed = [self._read(value, names) for value in _enclosed(function)]
        if _package(function) is not None:
            return f"{_name(function)} {enclosed}"
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        defaults += vars(function).values()
        read = self._variables(function.__globals__, names)
        return f"{_code(function.__code__)} {enclosed} {self._all(defaults)} {read}"

    def _variables(self, variables: Mapping[str, object], names: list[str]) -> list[str]:
        """Describe the variables of a module that code reads by these names."""
        read = [name for name in names if name in variables and not name.startswith("__")]
        return [f"{name} {self._read(variables[name], names)}" for name in read]

    def _read(self, value: object, names: list[str]) -> str:
        """Describe a value that code reads; of a module of no package, what it reads of that."""
        if not isinstance(value, types.ModuleType) or _package(value) is not None:
            return self.of(value)
        if value in self._seen:
            return value.__name__
        self._seen.add(value)
        return str(self._variables(vars(value), names))

    def _of_type(self, owner: type) -> str:
        if owner in self._seen or _package(owner) is not None:
            return _name(owner)
        self._seen.add(owner)
        parts = [
            f"{name} {self.of(value)}"
            for name, value in sorted(vars(owner).items())
            if isinstance(value, (types.FunctionType, *_WRAPPERS))
            or (self._strict and not name.startswith("__"))
        ]
        return f"{owner.__qualname__} {self._all(owner.__bases__)} {parts}"


def _is_trusted(value: object) -> bool:
    """Check whether a callable is code of vLLM or of this package."""
    while isinstance(value, functools.partial | types.MethodType):
        value = value.func if isinstance(value, functools.partial) else value.__func__
    return isinstance(value, types.FunctionType) and _package(value) in _TRUSTED


def _is_foreign(value: object, depth: int = 0) -> bool:
    """Check whether a callable is code of no installed package, or wraps such code."""
    if isinstance(value, types.FunctionType):
        if _package(value) is None:
            return True
    elif not isinstance(value, _WRAPPERS):
        return callable(value) and not isinstance(value, type) and _package(type(value)) is None
    return depth < _DEEPEST and any(_is_foreign(one, depth + 1) for one in _inside(value))


def _inside(value: object) -> Iterator[object]:
    """Values that a function or a wrapper of one may call."""
    if isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType | staticmethod | classmethod):
        yield value.__func__
    elif isinstance(value, property):
        yield from (value.fget, value.fset)
    elif isinstance(value, types.FunctionType):
        yield from _enclosed(value)


def _enclosed(function: types.FunctionType) -> Iterator[object]:
    """Variables of enclosing functions; one that has no value yet is left out."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue


@functools.cache
def _places() -> list[tuple[str, str]]:
    """Directories of the trusted packages, which may be installed as links to their sources."""
    specs = [(name, importlib.util.find_spec(name)) for name in sorted(_TRUSTED)]
    places = [(name, Path(spec.origin).parent) for name, spec in specs if spec and spec.origin]
    return [(f"{form}/", name) for name, place in places for form in {place, place.resolve()}]


@functools.cache
def _package_of_file(file: str) -> str | None:
    for place, name in _places():
        if file.startswith(place):
            return name
    for folder in ("/site-packages/", "/dist-packages/"):
        found = file.rpartition(folder)
        if found[1]:
            package = found[2].partition("/")[0].removesuffix(".py")
            return package if _version(package) else None
    paths = sysconfig.get_paths()
    inside = (f"{paths['stdlib']}/", f"{paths['platstdlib']}/")
    return _PYTHON if file.startswith(inside) else None


def _package(value: object) -> str | None:
    """Installed package that a function, class or module is of; None: it is of none."""
    module: str
    if isinstance(value, types.ModuleType):
        module = value.__name__
    else:
        file = value.__code__.co_filename if isinstance(value, types.FunctionType) else "<"
        if not file.startswith("<"):
            return _package_of_file(file)
        module = getattr(value, "__module__", None) or "builtins"
        if module == "builtins" and isinstance(value, types.FunctionType):
            return None  # made from text, in no module
    if module in _MAIN:
        return None
    loaded = getattr(sys.modules.get(module), "__file__", None)
    if loaded is not None:
        return _package_of_file(loaded)
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names:
        return _PYTHON
    return "torch" if top == "torch" else None


@functools.cache
def _version(package: str) -> str:
    """Version of a package; empty if none is known."""
    if package == _PYTHON:
        return f"{sys.version_info.major}.{sys.version_info.minor}"
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        names = importlib.metadata.packages_distributions().get(package, ())
        return " ".join(importlib.metadata.version(name) for name in sorted(set(names)))


def _is_method(function: object, kind: type) -> bool:
    """Check whether a function was written in a class or one of its bases, by their names."""
    owner = getattr(function, "__qualname__", "").rpartition(".")[0]
    return any(owner == base.__qualname__ for base in kind.__mro__)


def _name(value: object) -> str:
    """Name of a function or class, with the version of its package."""
    package = _package(value)
    if package is None:
        return str(getattr(value, "__qualname__", type(value).__qualname__))
    module = getattr(value, "__module__", None)
    return f"{module}.{getattr(value, '__qualname__', '')} {_version(package)}"


def _names(code: types.CodeType) -> set[str]:
    """Names of globals and attributes that code reads, those of inner functions included."""
    inner = [one for one in code.co_consts if isinstance(one, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _code(code: types.CodeType) -> str:
    """Digest of bytecode, names and constants; files and lines are left out."""
    constants = [_constant(one) for one in code.co_consts]
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    text = f"{code.co_code.hex()} {names} {constants}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _constant(value: object) -> str:
    if isinstance(value, types.CodeType):
        return _code(value)
    if isinstance(value, frozenset):  # whose order differs from process to process
        return repr(sorted(map(repr, value)))
    return repr(value)
