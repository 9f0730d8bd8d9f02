"""``ssdkv doctor``: versions, the plugin's registration with vLLM, the native modules."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from typing import Final

from vllm_ssdkv.base.errors import UnsupportedError
from vllm_ssdkv.cli.doctor.check_result import Finding, fail, ok, warn

PLUGIN_GROUP: Final = "vllm.general_plugins"
PLUGIN_NAME: Final = "ssdkv"
PLUGIN_VALUE: Final = "vllm_ssdkv.plugin:register"
BATCH_GROUP: Final = "vllm.endpoint_plugins"
BATCH_NAME: Final = "ssdkv_batch"
VLLM_RANGE: Final = ((0, 32), (0, 34))
"""Supported vLLM versions: from the first, below the second."""

_REINSTALL: Final = "install vllm-ssdkv again in this environment"
_TRY: Final = 'run python -c "import vllm" and repair what it reports'
_PROBE_TIMEOUT_S: Final = 300.0
# Runs in its own process: importing vLLM takes long, logs much, and may crash on a broken CUDA.
_PROBE: Final = """
import json, sys
found = {}
def attempt(name, step):
    try:
        found[name] = {"value": step()}
    except Exception as error:
        found[name] = {"error": f"{type(error).__name__}: {error}"}
    return "value" in found[name]
def cuda():
    import torch
    if not torch.cuda.is_available():
        return ""
    return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
def connector():
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.plugins import load_general_plugins
    load_general_plugins()
    from vllm_ssdkv.connector.names import CONNECTOR
    return KVConnectorFactory.get_connector_class_by_name(CONNECTOR).__module__
def batch():
    from importlib.metadata import entry_points
    (point,) = entry_points(group="vllm.endpoint_plugins", name="ssdkv_batch")
    return point.load().__module__
attempt("cuda", cuda)
if attempt("import", lambda: __import__("vllm").__version__):
    attempt("connector", connector)
    attempt("batch", batch)
print("\\n" + json.dumps(found), file=sys.__stdout__, flush=True)
"""


def _distribution_of(package: str) -> str | None:
    """Version of the distribution that brings the package, whatever it is called."""
    for name in (package, f"{package}-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    names = metadata.packages_distributions().get(package, [])
    return metadata.version(names[0]) if names else None


def vllm_version(version: str | None) -> Finding:
    """Check whether this version of vLLM is one that the hooks we use are known in."""
    wanted = (
        f"install vllm>={VLLM_RANGE[0][0]}.{VLLM_RANGE[0][1]},<{'.'.join(map(str, VLLM_RANGE[1]))}"
    )
    if version is None:
        return fail("vllm", "not installed", wanted)
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        return warn("vllm", f"{version}: not a release; untested", wanted)
    release = int(match[1]), int(match[2])
    if not VLLM_RANGE[0] <= release < VLLM_RANGE[1]:
        return fail("vllm", f"{version}: not supported", wanted)
    return ok("vllm", version)


def versions() -> list[Finding]:
    """Python, torch, vLLM and this package."""
    python = ".".join(map(str, sys.version_info[:3]))
    torch = _distribution_of("torch")
    return [
        ok("vllm-ssdkv", metadata.version("vllm-ssdkv")),
        ok("python", python)
        if sys.version_info >= (3, 11)
        else fail("python", python, "use Python 3.11 or newer"),
        ok("torch", torch) if torch else fail("torch", "not installed", "install vLLM"),
        vllm_version(_distribution_of("vllm")),
    ]


def entry_point(points: list[metadata.EntryPoint], allowed: str | None) -> Finding:
    """Check whether vLLM will find our plugin and may load it.

    Args:
        points: Entry points of the group ``vllm.general_plugins`` with our name.
        allowed: The environment variable ``VLLM_PLUGINS``, if set.
    """
    subject = "plugin entry point"
    values = sorted({point.value for point in points})
    if not values:
        return fail(subject, f"no {PLUGIN_NAME} in the group {PLUGIN_GROUP}", _REINSTALL)
    if values != [PLUGIN_VALUE]:
        return fail(subject, f"points to {', '.join(values)}", f"uninstall the other; {_REINSTALL}")
    if allowed is not None and PLUGIN_NAME not in allowed.split(","):
        return fail(
            subject,
            f"VLLM_PLUGINS={allowed} keeps vLLM from loading it",
            f"add {PLUGIN_NAME} to VLLM_PLUGINS, or unset it",
        )
    return ok(subject, PLUGIN_VALUE)


def batch_entry_point(points: list[metadata.EntryPoint], allowed: str | None) -> Finding:
    """Check whether vLLM will find the Batch API, which it loads only where it is asked to.

    Args:
        points: Entry points of the group ``vllm.endpoint_plugins`` with its name.
        allowed: The environment variable ``VLLM_PLUGINS``, if set.
    """
    subject = "Batch API"
    if len(points) != 1:
        return fail(subject, f"{len(points)} times in the group {BATCH_GROUP}", _REINSTALL)
    if allowed is None or BATCH_NAME not in allowed.split(","):
        return ok(subject, f"off; VLLM_PLUGINS={PLUGIN_NAME},{BATCH_NAME} loads it")
    return ok(subject, "on, as VLLM_PLUGINS says")


def entry_points() -> list[Finding]:
    """Check whether vLLM will find our plugins and may load them."""
    points = list(metadata.entry_points(group=PLUGIN_GROUP, name=PLUGIN_NAME))
    batch = list(metadata.entry_points(group=BATCH_GROUP, name=BATCH_NAME))
    allowed = os.environ.get("VLLM_PLUGINS")
    return [entry_point(points, allowed), batch_entry_point(batch, allowed)]


NATIVE_MODULES: Final = (
    ("_io", "checksums, page cache and disk I/O"),
    ("_index", "which slot holds which block"),
    ("_kernels", "CPU attention"),
)
"""Name, and what it does."""


def native_modules() -> list[Finding]:
    """The extension modules, and the instruction set that the kernels chose."""
    findings: list[Finding] = []
    for name, purpose in NATIVE_MODULES:
        try:
            module = importlib.import_module(f"vllm_ssdkv.{name}")
        except ImportError as error:
            findings.append(fail(name, f"cannot be imported ({purpose}): {error}", _REINSTALL))
            continue
        isa = f"; instruction set {module.isa()}" if hasattr(module, "isa") else ""
        findings.append(ok(name, purpose + isa))
    return findings


def encryption() -> list[Finding]:
    """Check whether the option ``encryption`` can be used; nothing where ``_io`` is missing."""
    try:
        from vllm_ssdkv.store.integrity.cipher import libcrypto_version
    except ImportError:
        return []
    try:
        return [ok("encryption", f"AES-256-GCM by {libcrypto_version()}")]
    except UnsupportedError as error:
        return [warn("encryption", str(error), "install OpenSSL 3 if stores are to be encrypted")]


def probe_vllm(timeout_s: float = _PROBE_TIMEOUT_S) -> list[Finding]:
    """Import vLLM in a child process, load its plugins there and look our connector up."""
    with tempfile.TemporaryDirectory(prefix="ssdkv-doctor-") as empty:
        try:
            # An empty working directory: python -c puts it on sys.path.
            done = subprocess.run(
                [sys.executable, "-c", _PROBE],
                cwd=empty,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return [fail("vllm import", f"did not end in {timeout_s:.0f} s", _TRY)]
    return read_probe(done.returncode, done.stdout, done.stderr)


def read_probe(returncode: int, stdout: str, stderr: str) -> list[Finding]:
    """Findings from what the child process of :func:`probe_vllm` left."""
    lines = stdout.splitlines()
    if returncode or not lines or not lines[-1].startswith("{"):
        last = (stderr.strip().splitlines() or ["no output"])[-1]
        text = f"the process that imported it ended with status {returncode}: {last}"
        return [fail("vllm import", text, _TRY)]
    found: dict[str, dict[str, str]] = json.loads(lines[-1])
    findings: list[Finding] = []
    for name, (subject, cure) in {
        "import": ("vllm import", "repair the vLLM installation"),
        "connector": ("connector SSDKVConnector", _REINSTALL),
        "batch": ("Batch API import", _REINSTALL),
    }.items():
        if name not in found:
            continue
        result = found[name]
        if "error" in result:
            findings.append(fail(subject, result["error"], cure))
        else:
            findings.append(ok(subject, f"loads ({result['value']})"))
    cuda = found["cuda"]
    if cuda.get("value"):
        findings.append(ok("CUDA", cuda["value"]))
    else:
        text = cuda.get("error", "no device; attention runs on the CPU")
        findings.append(warn("CUDA", text, "expected on a GPU machine? check nvidia-smi"))
    return findings
