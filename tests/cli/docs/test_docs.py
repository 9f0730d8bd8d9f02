"""``ssdkv lab docs`` and ``ssdkv config``: the generated pages, and options without an engine."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner, Result

from vllm_ssdkv import __version__
from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.base.metrics import BATCH_METRICS, METRICS
from vllm_ssdkv.base.metrics_node import NODE_SERVER_METRICS
from vllm_ssdkv.base.wait_reason import WaitReason
from vllm_ssdkv.cli.docs.doc_pages import (
    FIRST,
    for_tests,
    metrics_page,
    options_for_tests_page,
    options_page,
    with_section,
)
from vllm_ssdkv.cli.docs.messages_page import messages_page
from vllm_ssdkv.cli.main import app
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.config.node import NodeConfig
from vllm_ssdkv.config.pool import PoolConfig
from vllm_ssdkv.config.schema import walk
from vllm_ssdkv.config.secondary_tier import SecondaryTierConfig


def run(*arguments: str, stdin: str = "") -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin)


def listed(page: str) -> list[str]:
    """Names of the items of a page's lists."""
    return re.findall(r"^- `([^`]+)`", page, re.MULTILINE)


def cells(page: str) -> list[list[str]]:
    """The rows of the tables of a page, heads first."""
    rows = [line for line in page.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row[1:-1].split(" | ")] for row in rows]


def test_every_option_is_one_item() -> None:
    sections = options_page().split("\n## ")[1:]
    titles = [section.splitlines()[0] for section in sections]
    assert titles == ["The ones to know", "Tuning", "A node", "A pool", "The secondary tier"]
    first, tuning, node, pool, tier = (listed(section) for section in sections)
    tests = listed(options_for_tests_page())
    assert first == list(FIRST)
    assert len(first) == 10
    assert sorted(first + tuning + tests) == sorted(option.path for option in walk(SSDKVConfig))
    assert {option.path for option in walk(NodeConfig)} <= {*node, *first, *tuning, *tests}
    assert pool == [option.path for option in walk(PoolConfig)]
    assert tier == [option.path for option in walk(SecondaryTierConfig)]


@pytest.mark.parametrize(
    "text",
    [
        # its value and a reason that does not repeat it; a size; allowed values named before
        "`io.queue_depth`: Number of requests in flight per device. Allowed: an integer, from 1 to "
        "256. Default `16`: requests of 512 KiB make",
        "Default `10.0`: a healthy drive answers",
        "`io.scrub_rate`: Maximum number of bytes per second and worker at which stored blocks are "
        "read again and verified while nothing else uses the store; null is never. Allowed: a "
        "size, at least 1 MiB, or null. Default `null`: every read",
        'starts with an empty store in any case. Default `"quiet"`: Lost blocks',
        "`listen`: Addresses at which",
        "tcp://host:port. Required: Only the user knows where the engines run.",
    ],
)
def test_an_option_is_told_once(text: str) -> None:
    assert text in " ".join(options_page().split())


def test_faults_and_slow_devices_are_options_for_tests() -> None:
    tests = {option.path for option in walk(SSDKVConfig) if for_tests(option)}
    assert {"io.faults[].kind", "io.fault_file", "io.throttle", "offload.fault.after"} <= tests
    assert not tests & {"io.deadline", "offload.share", *FIRST}


def test_every_metric_is_one_item() -> None:
    engine, batch, node = metrics_page().split("\n## ")
    for section, metrics in [
        (engine, METRICS),
        (batch, BATCH_METRICS),
        (node, NODE_SERVER_METRICS),
    ]:
        assert listed(section) == [metric.exposed_name for metric in metrics]
    told = " ".join(engine.split())
    assert "`vllm:ssdkv_layers_waiting` (gauge, layers, max): Maximum" in told
    assert "(errors): Number of times that the device refused to be trimmed. `device`." in told
    assert (
        "Time that an I/O request spent in the device. `device`. `direction`: read, write." in told
    )


def test_the_example_on_the_page_is_valid() -> None:
    page = options_page()
    text = page[page.index("'{") + 1 : page.index("}'") + 1]
    SSDKVConfig.from_extra_config(json.loads(text)["kv_connector_extra_config"])


def test_written_pages_pass_the_check(tmp_path: Path) -> None:
    place = tmp_path / "docs"
    assert run("lab", "docs", "check", str(place)).exit_code == 1, "nothing is there yet"
    assert run("lab", "docs", "write", str(place)).exit_code == 0
    assert sorted(path.name for path in place.iterdir()) == [
        *("cli.md", "fpga-tables.md", "gpu.md", "messages.md"),
        *("metrics.md", "models.md", "options-for-tests.md", "options.md", "papers.md"),
    ]
    assert run("lab", "docs", "check", str(place)).exit_code == 0
    assert run("lab", "docs", "write", str(place)).output == "", "nothing to write"


def test_an_edited_page_fails_the_check_with_a_diff(tmp_path: Path) -> None:
    run("lab", "docs", "write", str(tmp_path))
    page = tmp_path / "options.md"
    page.write_text(page.read_text().replace("# Options", "# Opinions"))
    result = run("lab", "docs", "check", str(tmp_path))
    assert result.exit_code == 1
    assert "-# Opinions" in result.output
    assert "+# Options" in result.output
    assert "metrics.md" not in result.output
    run("lab", "docs", "write", str(tmp_path))
    assert run("lab", "docs", "check", str(tmp_path)).exit_code == 0


def test_reasons_to_wait_are_in_the_page_of_messages() -> None:
    _, _, section = messages_page().partition("\n## Why a request waits\n")
    _, _, *rows = cells(section)
    assert [row[0] for row in rows] == [f"`{reason.label}`" for reason in WaitReason]
    assert all(all(row) and len(row) == 5 for row in rows)


def test_a_section_is_written_into_a_page_by_hand() -> None:
    begin = "<!-- x: generated by `ssdkv lab docs write`; do not edit. -->\n"
    page = f"# Before\n\n{begin}\nold\n\n<!-- end of x -->\n\n# After\n"
    assert with_section(page, "x", "new") == page.replace("old", "new")
    assert with_section(page, "x", "old") == page
    with pytest.raises(ValueError, match="no section <!-- y: "):
        with_section(page, "y", "")


@pytest.mark.parametrize("wrapped", [False, True])
def test_good_options_pass(tmp_path: Path, wrapped: bool) -> None:
    options: dict[str, object] = {"mode": "page", "devices": ["/a"]}
    given = {"kv_connector": "SSDKVConnector", "kv_connector_extra_config": options}
    file = tmp_path / "options.json"
    file.write_text(json.dumps(given if wrapped else options))
    result = run("config", "check", str(file))
    assert (result.exit_code, result.output) == (0, "ok\n")
    assert run("config", "check", "-", stdin=file.read_text()).exit_code == 0


def test_bad_options_are_told_line_by_line() -> None:
    result = run("config", "check", "-", stdin='{"devcies": [], "io": {"queue_depth": 0}}')
    assert result.exit_code == 1
    assert result.stderr.splitlines()[1:] == [
        "  io.queue_depth: got 0; allowed: an integer, from 1 to 256",
        "  devcies: unknown option; did you mean devices?",
    ]


def test_a_transfer_config_without_options_is_one_with_none() -> None:
    result = run("config", "check", "-", stdin='{"kv_connector": "SSDKVConnector"}')
    assert (result.exit_code, result.stdout) == (0, "ok\n")


def test_a_path_where_a_list_belongs_is_told_how() -> None:
    result = run("config", "check", "-", stdin='{"devices": "/mnt/a"}')
    assert result.exit_code == 1
    assert 'such as ["/mnt/nvme0/kv"]' in result.stderr


def test_a_check_as_json() -> None:
    result = run("config", "check", "-", "--json", stdin="{}")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {"ok": True, "problems": [], "warnings": []}
    result = run("config", "check", "-", "--json", stdin='{"devcies": []}')
    found = json.loads(result.stdout)
    assert (result.exit_code, found["ok"]) == (1, False)
    assert found["problems"][1:] == ["  devcies: unknown option; did you mean devices?"]


def test_what_is_given_in_vain_is_a_warning() -> None:
    options = '{"sparse": {"budget": 0.25}}'
    line = 'sparse.budget has no effect unless mode is "page" and selector "bounds", "spread", '
    for command in ("check", "show"):
        result = run("config", command, "-", stdin=options)
        assert result.exit_code == 0
        assert result.stderr.startswith(f"warning: {line}")
        found = json.loads(run("config", command, "-", "--json", stdin=options).stdout)
        assert [warning.startswith(line) for warning in found["warnings"]] == [True]
    assert run("config", "check", "-", stdin=options).stdout == "ok\n"


def offloading(*tiers: dict[str, object], **more: object) -> str:
    """Configuration of vLLM's own connector, with these tiers."""
    given = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 1, "secondary_tiers": tiers}
    extra = {name: value for name, value in {**given, **more}.items() if value is not None}
    return json.dumps({"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra})


TIER: dict[str, object] = {"type": "SSDKVTier", "module_path": "vllm_ssdkv.secondary_tier"}


@pytest.mark.parametrize("text", [offloading({"type": "fs"}, TIER), json.dumps(TIER)])
def test_a_tier_is_checked_and_shown(text: str) -> None:
    result = run("config", "check", "-", stdin=text)
    assert (result.exit_code, result.output) == (0, "ok\n")
    found = json.loads(run("config", "show", "-", "--json", stdin=text).stdout)
    rows = {row["option"]: row["value"] for row in found["options"]}
    assert rows["on_reset"] == "new_identity"
    assert rows["io.deadline"] == 10.0
    assert "verify_hits" not in rows


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (offloading({**TIER, "weigths_id": "a"}), "weigths_id: unknown option; did you mean"),
        (offloading({**TIER, "on_reset": "keep"}), 'on_reset: got "keep"; allowed: "new_identity"'),
        (
            offloading({"type": "SSDKVTier"}),
            'secondary_tiers[0].module_path: got null; give "vllm_ssdkv.secondary_tier"',
        ),
        (
            offloading({"type": "fs"}, {**TIER, "type": "SSDKV"}),
            'secondary_tiers[1].type: got "SSDKV"; give "SSDKVTier"',
        ),
        (
            offloading(TIER, spec_name=None),
            'spec_name: got null, with which vLLM has no secondary tiers; give "TieringOffloading',
        ),
        (offloading(TIER, cpu_bytes_to_use=None), "cpu_bytes_to_use: missing; give the size of"),
        (offloading(TIER, devices=["/a"]), "devices: belongs into the entry of secondary_tiers"),
        (offloading(), "secondary_tiers: no entry is ours; add {"),
        (offloading(secondary_tiers="SSDKVTier"), "secondary_tiers: no entry is ours; add {"),
    ],
)
def test_wrong_options_of_a_tier_are_told_by_name(text: str, says: str) -> None:
    result = run("config", "check", "-", stdin=text)
    assert result.exit_code == 1
    assert says in result.stderr


@pytest.mark.parametrize(
    ("text", "reason"),
    [(b"{", "line 1, column 2"), (b"[]", "not a JSON object"), (b"\xff", "can't decode")],
)
def test_what_is_no_json_object_is_told(text: bytes, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "options.json"
    file.write_bytes(text)
    result = run("config", "check", str(file))
    assert result.exit_code == 1
    assert str(file) in result.stderr
    assert reason in result.stderr


def test_a_missing_file_is_told() -> None:
    result = run("config", "check", "/no/such/file")
    assert result.exit_code == 1
    assert "/no/such/file" in result.stderr


def test_show_prints_every_option_and_where_it_comes_from(tmp_path: Path) -> None:
    options = {
        "devices": [{"path": str(tmp_path), "capacity": "1GiB", "weight": 2}],
        "io": {"queue_depth": 7},
        "dram_gib": 1,
    }
    result = run("config", "show", "-", stdin=json.dumps(options))
    assert result.exit_code == 0
    words = [line.split() for line in result.output.splitlines()]
    assert ["io.queue_depth", "7", "given"] in words
    assert ["io.deadline", "10.0", "default"] in words
    assert {line[0] for line in words if line} >= {
        option.path
        for option in walk(SSDKVConfig)
        if "[]" not in option.path and not option.path.startswith(("encryption.", "offload."))
    }
    assert ["encryption", "null", "default"] in words
    assert ["DRAM", "of", "a", "single", "worker", "1", "GiB"] in words
    assert "1 GiB, weight 2" in result.output


def test_show_as_json(tmp_path: Path) -> None:
    options = {"devices": [{"path": str(tmp_path), "capacity": "1GiB"}], "dram_gib": 1}
    result = run("config", "show", "-", "--json", stdin=json.dumps(options))
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    rows = {row["option"]: (row["value"], row["source"]) for row in found["options"]}
    assert rows["dram_gib"] == (1.0, "given")
    assert rows["io.deadline"] == (10.0, "default")
    assert rows["devices"][0][0]["capacity"] == 1 << 30
    assert found["on_this_machine"][f"device {tmp_path}"] == "1 GiB, weight 1"


def test_the_schema_is_of_what_users_write() -> None:
    schema = json.loads(run("config", "schema").stdout)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    page = options_page()
    example = json.loads(page[page.index("'{") + 1 : page.index("}'") + 1])
    good: list[dict[str, object]] = [
        example["kv_connector_extra_config"],
        {},
        {"dram_gib": "4GiB", "io": {"staging": "4MiB"}},
        {"dram_gib": 0.5, "batch": {"capacity": 1 << 30}},
        {"devices": [{"path": "/a", "capacity": None, "tbw": "1.4TB"}]},
    ]
    bad: list[dict[str, object]] = [
        {"devices": [{"pth": "/a"}]},
        {"devices": [7]},
        {"io": {"queue_depth": 0}},
        {"unknown": 1},
        {"dram_gib": []},
    ]
    for options in good:
        SSDKVConfig.from_extra_config(options)
        assert list(validator.iter_errors(options)) == [], options
    for options in bad:
        assert list(validator.iter_errors(options)), options
        with pytest.raises(ConfigError):
            SSDKVConfig.from_extra_config(options)


def test_show_without_options_prints_the_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    result = run("config", "show")
    assert result.exit_code == 0
    assert "given" not in result.output
    assert str(tmp_path / "ssdkv" / "MODEL") in result.output.replace("\n", "").replace(" ", "")


def test_version() -> None:
    assert run("--version").output == f"{__version__}\n"
