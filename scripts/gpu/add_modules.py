"""Adds the native modules of this Python to a packed site, so that it can rehearse with it.

    python scripts/gpu/add_modules.py SITE

Extension modules of several Pythons may lie side by side, since their names differ. Prints the
name of this Python if all of them were added; a package of another version here is left out, and
named on standard error.
"""

from __future__ import annotations

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


def installed_version(name: str) -> str | None:
    """Version of a distribution here."""
    for found in metadata.distributions(name=name):
        return found.version
    return None


def main() -> None:
    """Copy the modules."""
    site = Path(sys.argv[1])
    suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
    complete = True
    for package, name in PACKAGES.items():
        if packed_version(site, name) != installed_version(name):
            print(f"pack: {name} here is not the packed version", file=sys.stderr)
            complete = False
            continue
        # An editable install has its native modules elsewhere than its Python files.
        held = metadata.distribution(name)
        modules = [file for file in held.files or () if file.name.endswith(suffix)]
        if not modules:
            print(f"pack: {name} here has no native modules", file=sys.stderr)
            complete = False
        for file in modules:
            shutil.copy2(str(held.locate_file(file)), site / package / file.name)
    if complete:
        print(f"{platform.python_implementation()} {'.'.join(platform.python_version_tuple()[:2])}")


if __name__ == "__main__":
    main()
