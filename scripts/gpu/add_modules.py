"""Adds the native modules of this Python to a packed site, so that it can rehearse with it.

    python scripts/gpu/add_modules.py SITE

Extension modules of several Pythons may lie side by side, since their names differ. Prints the
name of this Python if all of them were added; a package of another version here is left out, and
named on standard error.
"""

from __future__ import annotations

import importlib.util
import platform
import shutil
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

PACKAGES = {
    "vllm_ssdkv": "vllm-ssdkv",
    "msgspec": "msgspec",
    "pydantic_core": "pydantic-core",
}
"""Packages with native modules, and the distributions that hold them."""


def packed_version(site: Path, name: str) -> str | None:
    """Version of a distribution in ``site``."""
    for found in metadata.distributions(name=name, path=[str(site)]):
        return found.version
    return None


def main() -> None:
    """Copy the modules."""
    site = Path(sys.argv[1])
    suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
    complete = True
    for package, name in PACKAGES.items():
        spec = importlib.util.find_spec(package)
        origin = None if spec is None else spec.origin
        if origin is None or metadata.version(name) != packed_version(site, name):
            print(f"pack: {name} here is not the packed version", file=sys.stderr)
            complete = False
            continue
        for module in Path(origin).parent.glob(f"*{suffix}"):
            shutil.copy2(module, site / package / module.name)
    if complete:
        print(f"{platform.python_implementation()} {'.'.join(platform.python_version_tuple()[:2])}")


if __name__ == "__main__":
    main()
