"""The model as this rank computes with it: digest of all of it, and whether it has changed."""

from __future__ import annotations

import enum
import hashlib
import logging
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_ssdkv.base.errors import UnsupportedError
from vllm_ssdkv.connector.identity.module_code import CodeProbe, ModelCode
from vllm_ssdkv.connector.identity.module_tree import TREE, ModuleTree, describe
from vllm_ssdkv.kernels.tensor_digest import TensorProbe, digest_tensors

logger = logging.getLogger(__name__)

DIGEST_BYTES = 16

_TORCH_OWN = frozenset(vars(torch.nn.Module()))
"""Attributes that every module has."""

_OF_COMPILING = frozenset(
    {
        "_compile_prefix",
        "_compile_tag",
        "_compiled_bytecode",
        "_dynamic_arg_dims",
        "_is_encoder",
        "compiled",
        "do_not_compile",
        "evaluate_guards",
        "first_compile",
        "layerwise_nvtx_tracing_enabled",
        "was_aot_compile_fn_loaded_from_disk",
    }
)
"""Attributes that say how the model is run, not what it computes."""

_WRAPPERS = "vllm.lora."
"""Modules around those of the model where adapters are enabled. Without one they change nothing."""

_LONGEST = 64
_DEEPEST = 3


@dataclass(frozen=True, slots=True)
class ModelDigest:
    """Digest of a rank's model.

    Attributes:
        digest: Of all parameters, buffers and settings, 16 bytes.
        nbytes: Of the tensors.
        seconds: It took.
    """

    digest: bytes
    nbytes: int
    seconds: float


class LoadedModel:
    """The modules that hold a set of layers: the model, and a drafter where there is one.

    Parameters, buffers (tables of rotary positions among them), the modules' settings (scales,
    windows, caps, kinds of kernels), hooks, replaced methods and remote code make the digest. Used
    by the worker's thread.
    """

    def __init__(
        self,
        layers: Iterable[torch.nn.Module],
        files: Callable[[], str],
        tree: ModuleTree = TREE,
    ):
        """
        Args:
            layers: With KV or a state, as vLLM knows them.
            files: Digest of the whole content of the weights' files, empty where there are none;
                asked for when a kernel has taken weights away unseen.
            tree: Where modules are recorded.

        Raises:
            UnsupportedError: nobody holds a layer: vLLM made the model before it loaded plugins.
        """
        roots: dict[int, torch.nn.Module] = {}
        for layer in layers:
            root = tree.root_of(layer)
            if root is layer:
                raise UnsupportedError(
                    "the model cannot be found from its attention layers, so nothing tells whose "
                    "KV this is: the plugin did not load. Leave VLLM_PLUGINS unset or include "
                    "ssdkv in it, and run `ssdkv doctor`"
                )
            roots.setdefault(id(root), root)
        self._tree, self._files = tree, files
        self._roots = [weakref.ref(root) for root in roots.values()]
        self._probe: TensorProbe | None = None
        self._code: CodeProbe | None = None
        self._registered: list[int] = []
        self._substitute = ""
        """Text in place of weights that a kernel keeps where nobody sees them."""

    @property
    def roots(self) -> list[torch.nn.Module]:
        """The model first, in the order of its layers."""
        return [root for ref in self._roots if (root := ref()) is not None]

    @property
    def routed(self) -> bool:
        """Check whether a model has experts, to which it sends single tokens."""
        names = (
            type(module).__qualname__.lower() for root in self.roots for module in root.modules()
        )
        return any("moe" in name or "expert" in name for name in names)

    def digest(self) -> ModelDigest:
        """One pass over all of it, at the speed of memory; :meth:`changed` is relative to it.

        Raises:
            UnsupportedError: weights can be seen neither in memory nor in files.
        """
        started = time.perf_counter()
        code = ModelCode(plain)
        lines = code.shared()
        named: list[tuple[str, torch.Tensor]] = []
        unseen: list[str] = []
        seen: set[int] = set()
        for number, root in enumerate(self.roots):
            for place, module in root.named_modules(prefix=str(number)):
                path = place.replace(".base_layer", "")
                lines += code.lines(path, module)
                if not type(module).__module__.startswith(_WRAPPERS):
                    lines.append(f"{path} {type(module).__qualname__} {settings_of(module)}")
                for name, tensor in _tensors_of(module):
                    if id(tensor) in seen:
                        continue
                    seen.add(id(tensor))
                    taken = self._tree.taken(module, name)
                    if taken is not None:
                        lines.append(f"{path}.{name} taken {taken}")
                    elif tensor.numel() == 0 and self._tree.held(module, name):
                        unseen.append(f"{path}.{name}")
                    named.append((f"{path}.{name}", tensor))
        if code.unstable:
            logger.warning(
                "ssdkv: %d hook(s) or method(s) of the model run code that cannot be identified, "
                "first %s: KV that they change is not found any more after the next reset or start",
                len(code.unstable),
                code.unstable[0],
            )
        if unseen:
            lines.append(self._in_place_of(unseen))
        else:
            self._substitute = ""
        tensors = [tensor for _, tensor in named]
        digests = digest_tensors(tensors).tolist()
        lines += [
            f"{name} {describe(tensor, digest)}"
            for (name, tensor), digest in zip(named, digests, strict=True)
        ]
        self._probe = TensorProbe(tensors)
        self._code = CodeProbe(module for root in self.roots for module in root.modules())
        self._tree.watch(self.roots)
        self._registered = self._registrations()
        found = hashlib.blake2b("\n".join(lines).encode(), digest_size=DIGEST_BYTES).digest()
        nbytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
        return ModelDigest(found, nbytes, time.perf_counter() - started)

    def _in_place_of(self, unseen: Sequence[str]) -> str:
        """A substitute for weights that a kernel keeps where nobody sees them.

        The files, as long as weights are those of the start; later ones are like no others.
        """
        if self._substitute and not self._weights_changed():
            return self._substitute
        if self._probe is not None:
            self._substitute = f"loaded anew {uuid.uuid4()}"
            return self._substitute
        found = self._files()
        if not found:
            raise UnsupportedError(
                f"a kernel keeps the weights of {unseen[0]} and {len(unseen) - 1} more where they "
                "cannot be read, and the model has no weight files on this machine: nothing tells "
                "whose KV this is. Download the model, or leave --kv-transfer-config out"
            )
        logger.info(
            "ssdkv: a kernel keeps the weights of %s and %d more where they cannot be read: the "
            "content of the model's files stands for them",
            unseen[0],
            len(unseen) - 1,
        )
        self._substitute = f"files {found}"
        return self._substitute

    def changed(self) -> bool:
        """Check whether weights may be others than at the last :meth:`digest`: a cheap look.

        It finds what loads weights anew: parameters that are replaced, and content that is. A few
        words of each tensor are compared. It finds hooks and methods that are put on or taken away.
        """
        return self._code is None or self._code.changed() or self._weights_changed()

    def _weights_changed(self) -> bool:
        return self._probe is None or self.touched() or self._probe.changed()

    def touched(self) -> bool:
        """Check whether anything was registered since, as vLLM's own reloading does. It is free."""
        return self._registered != self._registrations()

    def _registrations(self) -> list[int]:
        return [self._tree.changes(root) for root in self.roots]


class LoadedAdapters:
    """Digests of the adapters that vLLM holds in memory, by their number.

    Used by the worker's thread.
    """

    def __init__(self, roots: Iterable[torch.nn.Module]):
        managers: list[Any] = [getattr(root, "lora_manager", None) for root in roots]
        self._managers = [manager for manager in managers if manager is not None]
        self._known: dict[int, tuple[object, bytes, int]] = {}
        self._changes = 0

    def take_changes(self) -> dict[int, tuple[bytes, int]]:
        """Adapters that have changed since the last call: digest, empty for one that is gone, and
        the number of changes up to it.

        One pass over what is new.
        """
        there: dict[int, object] = {}
        for manager in self._managers:
            there |= manager.list_adapters()
        changes = {}
        for number in self._known.keys() - there.keys():
            del self._known[number]
            self._changes += 1
            changes[number] = b"", self._changes
        for number, adapter in there.items():
            known = self._known.get(number, (None, b"", 0))
            if known[0] is not adapter:
                digest = digest_of_adapter(adapter)
                self._changes += digest != known[1]
                at = self._changes if digest != known[1] else known[2]
                self._known[number] = adapter, digest, at
                if digest != known[1]:
                    changes[number] = digest, self._changes
        return changes

    def changes(self, number: int) -> int:
        """Number of the change that an adapter came with, at the last call of
        :meth:`take_changes`."""
        return self._known.get(number, (None, b"", -1))[2]


def digest_of_adapter(adapter: Any) -> bytes:  # noqa: ANN401 - vLLM's LoRAModel
    """Digest of the weights of an adapter, 16 bytes, whatever its name and number."""
    named: list[tuple[str, torch.Tensor]] = []
    lines = [f"3d {getattr(adapter, 'is_3d_lora_weight', False)}"]
    for kind in ("loras", "modules_to_save"):
        for name, layer in sorted(getattr(adapter, kind, {}).items()):
            lines.append(f"{kind} {name} {plain(vars(layer).get('scaling'))}")
            named += [(f"{kind} {name}.{part}", t) for part, t in _flat(vars(layer))]
    digests = digest_tensors([tensor for _, tensor in named]).tolist()
    lines += [
        f"{name} {describe(tensor, digest)}"
        for (name, tensor), digest in zip(named, digests, strict=True)
    ]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=DIGEST_BYTES).digest()


def _flat(parts: Mapping[str, object]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors among these values, and in lists of them, with their names."""
    for name, value in sorted(parts.items()):
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, list | tuple):
            yield from _flat({f"{name}[{i}]": one for i, one in enumerate(value)})


def _tensors_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and not torch.nn.parameter.is_lazy(tensor):
            yield name, tensor


def settings_of(module: torch.nn.Module) -> str:
    """Settings of a module in one line: its plain attributes, and those of its attention.

    Numbers, texts, dtypes, enums and classes, in lists and mappings too; of other objects the
    class. Texts that look like paths are left out: a model that was moved is the same.
    """
    found = _plain_attributes(vars(module))
    implementation = getattr(module, "impl", None)
    if implementation is not None and not isinstance(implementation, torch.nn.Module):
        of_impl = _plain_attributes(vars(implementation))
        found |= {f"impl.{name}": value for name, value in of_impl.items()}
    return " ".join(f"{name}={value}" for name, value in sorted(found.items()))


def _plain_attributes(attributes: Mapping[str, object]) -> dict[str, str]:
    found = {}
    for name, value in attributes.items():
        if name in _TORCH_OWN or name in _OF_COMPILING or value is None or value is False:
            continue  # that nothing was decided and that it was decided against is the same
        text = plain(value)
        if text is None and type(value).__module__.startswith("vllm.model_executor"):
            text = type(value).__qualname__
        if text is not None:
            found[name] = text
    return found


def plain(value: object, depth: int = 0) -> str | None:
    """Text of a value that has one and the same in every process; None: it has none."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, str):
        return None if "/" in value else repr(value)
    if value is None or isinstance(value, bool | int | float | torch.dtype):
        return repr(value)
    if isinstance(value, type):
        return value.__qualname__
    if depth < _DEEPEST and isinstance(value, list | tuple | dict) and len(value) <= _LONGEST:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        parts = [(str(key), plain(one, depth + 1)) for key, one in items]
        if all(part is not None for _, part in parts):
            return "{" + ",".join(f"{key}:{part}" for key, part in parts) + "}"
    return None
