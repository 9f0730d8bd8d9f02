"""Options: what is taken, what is refused, and how the refusal reads."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from vllm_ssdkv.base import host
from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.base.host import default_capacity
from vllm_ssdkv.base.sizes import GIB, MIB
from vllm_ssdkv.config import engine
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.config.io import FaultConfig, ThrottleConfig
from vllm_ssdkv.config.io_engine import (
    EngineOptions,
    FaultKind,
    FaultRule,
    ThrottleRule,
)
from vllm_ssdkv.config.schema import Option, walk
from vllm_ssdkv.config.sparse import LEAST_CHOOSING

OPTIONS = list(walk(SSDKVConfig))
OFF = re.compile(r"(encryption|offload)\.")
"""Options in groups that are null by default."""


def build(options: dict[str, object]) -> SSDKVConfig:
    return SSDKVConfig.from_extra_config(options)


def refused(options: dict[str, object]) -> list[str]:
    """The lines of the error, one per problem."""
    with pytest.raises(ConfigError) as caught:
        build(options)
    first, *lines = str(caught.value).splitlines()
    assert first == "kv_connector_extra_config:"
    return [line.strip() for line in lines]


# --- what is taken


def test_short_requests_are_exact_where_the_window_takes_the_budget() -> None:
    def below(**sparse: object) -> int:
        options = {"mode": "page", "selector": "bounds", "hbm_window_tokens": 1024}
        return build({**options, "sparse": sparse}).exact_below

    assert build({"mode": "page", "selector": "bounds"}).exact_below == 2 * 256 * 8
    assert below() == 2 * 1024 * 8 > LEAST_CHOOSING
    assert below(budget=0.3) == 6827
    assert below(budget=1) == LEAST_CHOOSING
    assert below(budget_tokens=5000) == 5000
    assert below(budget_tokens=1100) == LEAST_CHOOSING
    assert below(exact_below=0) == 0
    assert below(budget_tokens=4096, exact_below=77) == 77


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({}, 1024),
        ({"selector": "bounds"}, 256),
        ({"selector": "bounds", "page_tokens": 512}, 512),
        ({"selector": "bounds", "hbm_window_tokens": 2048}, 2048),
    ],
)
def test_the_window_is_smaller_where_it_counts_in_a_budget(
    options: dict[str, object], tokens: int
) -> None:
    assert build({"mode": "page", **options}).window_tokens == tokens


def test_nothing_given_is_a_valid_config() -> None:
    made = build({})
    assert (made.mode, made.devices, made.io.engine) == ("reuse", (), "auto")


def test_weights_are_given_or_to_be_measured() -> None:
    def weights(*given: float | None) -> tuple[float, ...] | None:
        entries = [{"path": f"/{i}", "weight": weight} for i, weight in enumerate(given)]
        return build({"devices": entries}).device_weights()

    assert weights() == weights(None) == (1.0,)
    assert weights(None, None) is None
    assert weights(None, 3, None) == (1.0, 3.0, 1.0)


def test_everything_given(tmp_path: Path) -> None:
    made = build(
        {
            "mode": "page",
            "devices": [str(tmp_path / "a"), {"path": "/b:1GiB", "capacity": "1TiB", "weight": 2}],
            "state_dir": str(tmp_path),
            "dram_gib": "512MiB",
            "hbm_window_tokens": 64,
            "page_tokens": 32,
            "selector": "exact",
            "encryption": {"key_file": str(tmp_path / "key")},
            "io": {
                "engine": "threads",
                "queue_depth": 4,
                "deadline": 3,
                "staging": 4 * MIB,
                "direct": "off",
                "faults": [{"kind": "eio", "device": 1}],
                "fault_file": str(tmp_path / "faults.json"),
                "throttle": [{"device": 0}],
            },
        }
    )
    assert made.devices[0].path == str(tmp_path / "a")
    assert made.devices[1].path == "/b:1GiB", "a colon is part of a path"
    assert made.devices[1].capacity == 1 << 40
    assert made.device_weights() == (1.0, 2.0)
    assert made.dram_gib == 0.5
    assert made.encryption is not None
    assert made.encryption.key_file == str(tmp_path / "key")
    assert made.io.deadline == 3.0
    assert made.io.faults[0].kind == "eio"


def test_python_paths_are_taken(tmp_path: Path) -> None:
    assert build({"devices": [tmp_path]}).devices[0].path == str(tmp_path)


def test_home_is_expanded_and_paths_are_normalised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    assert build({"devices": ["~/kv/../kv2//"]}).devices[0].path == "/somewhere/kv2"


PATHS = [option.path for option in OPTIONS if option.allowed.startswith("a path")]


def test_paths_begin_where_the_process_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And processes that run elsewhere are given what they meant."""
    assert len(PATHS) == 7
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/somewhere")
    given: dict[str, object] = {
        "devices": ["kv", {"path": "~/b", "capacity": "1GiB"}],
        "state_dir": Path("state"),
        "encryption": {"key_file": "./key"},
        "io": {"fault_file": "../faults", "queue_depth": 3},
        "batch": {"directory": "batch"},
        "mode": "page",
        "offload": {"kind": "fpga", "backend": "xrt", "xclbin": "a.xclbin"},
        "dram_gib": "1GiB",
    }
    meant: dict[str, object] = {
        "devices": [f"{tmp_path}/kv", {"path": "/somewhere/b", "capacity": "1GiB"}],
        "state_dir": f"{tmp_path}/state",
        "encryption": {"key_file": f"{tmp_path}/key"},
        "io": {"fault_file": f"{tmp_path.parent}/faults", "queue_depth": 3},
        "batch": {"directory": f"{tmp_path}/batch"},
        "mode": "page",
        "offload": {"kind": "fpga", "backend": "xrt", "xclbin": f"{tmp_path}/a.xclbin"},
        "dram_gib": "1GiB",
    }
    made = build(given)
    assert made.with_absolute_paths(given) == meant
    keys = {"nodes": ["unix:///s"], "node_keys": "keys"}
    assert build(keys).with_absolute_paths(keys) == keys | {"node_keys": f"{tmp_path}/keys"}
    monkeypatch.chdir("/")
    assert build(meant) == made


def test_a_working_directory_that_is_gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    (line,) = refused({"state_dir": "kv"})
    assert line.startswith('state_dir: got "kv"; the working directory, where it begins, was')
    build({"state_dir": "/kv"})


def test_a_config_never_changes() -> None:
    made = build({"devices": ["/a"]})
    with pytest.raises(ValidationError, match="frozen"):
        made.mode = "page"
    with pytest.raises(ValidationError, match="frozen"):
        made.io.queue_depth = 3


@given(st.permutations(["mode", "devices", "io"]))
def test_equal_options_make_equal_configs(order: list[str]) -> None:
    options: dict[str, object] = {"mode": "page", "devices": ["/a"], "io": {"queue_depth": 2}}
    assert build({name: options[name] for name in order}) == build(options)


def test_engine_gets_the_same_settings() -> None:
    fault = {"kind": "stall", "device": 0, "op": "read", "after": 3, "count": 2, "seconds": 1.5}
    throttle = {"bandwidth": "150MB", "iops": 1000, "latency": 0.001, "dilation": 4}
    made = build(
        {
            "io": {
                "engine": "noop",
                "queue_depth": 3,
                "faults": [fault],
                "fault_file": "/f",
                "throttle": [throttle],
            }
        }
    )
    assert made.io.engine_options() == EngineOptions(
        engine="noop",
        queue_depth=3,
        faults=(FaultRule(kind="stall", device=0, op="read", after=3, count=2, seconds=1.5),),
        fault_file="/f",
        throttle=(ThrottleRule(bandwidth=150e6, iops=1000, latency_s=0.001, dilation=4),),
    )
    assert build({}).io.engine_options() == EngineOptions()


def test_options_and_engine_know_the_same_names() -> None:
    """A field or choice that is added to the engine is missing here until it is an option."""
    assert set(FaultConfig.model_fields) == {field.name for field in fields(FaultRule)}
    assert len(ThrottleConfig.model_fields) == len(fields(ThrottleRule))
    assert get_args(FaultConfig.model_fields["kind"].annotation) == get_args(FaultKind)


# --- what is refused


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"mode": "pages"}, 'mode: got "pages"; allowed: "reuse" or "page"'),
        ({"retain_share": 1.5}, "retain_share: got 1.5; allowed: a number, from 0 to 1"),
        ({"mode": None}, 'mode: got null; allowed: "reuse" or "page"'),
        ({"devices": "/a"}, 'devices: got "/a"; allowed: a list of'),
        ({"devices": [5]}, "devices[0]: got 5; allowed: an object with path, capacity, weight"),
        ({"devices": ["/a", ""]}, 'devices[1].path: got ""; empty; allowed: a path (~ is'),
        ({"devices": ["~no-such-user/a"]}, 'devices[0].path: got "~no-such-user/a"; there is no'),
        ({"devices": ["a\0b"]}, 'devices[0].path: got "a\\u0000b"; a path has no NUL byte'),
        ({"devices": [f"/{n}" for n in range(65)]}, "devices: got ["),
        (
            {"devices": [{"capacity": "1GiB"}]},
            "devices[0].path: missing; give a path (~ is the home",
        ),
        (
            {"devices": [{"path": "/a", "capacity": "15MiB"}]},
            'devices[0].capacity: got "15MiB"; allowed: a number of bytes',
        ),
        ({"devices": [{"path": "/a", "capacity": "1 GiBB"}]}, "devices[0].capacity: got"),
        (
            {"devices": [{"path": "/a", "weight": 0}]},
            "devices[0].weight: got 0; allowed: a number, above 0 and at most 64",
        ),
        ({"devices": [{"path": "/a", "weight": -1}]}, "devices[0].weight: got -1"),
        ({"devices": [{"path": "/a", "weight": float("inf")}]}, "devices[0].weight: got Inf"),
        ({"dram_gib": 0}, "dram_gib: got 0; allowed: a number of GiB or a size"),
        ({"dram_gib": "4 gigs"}, 'dram_gib: got "4 gigs"; unknown unit'),
        (
            {"dram_gib": "4"},
            'dram_gib: got "4"; as a text it needs its unit, such as 4GiB; allowed',
        ),
        ({"dram_gib": 4 * 10**9}, "dram_gib: got 4000000000; a number is GiB; for bytes give"),
        ({"dram_gib": float("nan")}, "dram_gib: got NaN"),
        ({"hbm_window_tokens": 8}, "hbm_window_tokens: got 8; allowed: an integer, at least 16"),
        ({"hbm_window_tokens": 64.5}, "hbm_window_tokens: got 64.5"),
        ({"page_tokens": 48}, "page_tokens: got 48; not a power of two"),
        ({"page_tokens": 8}, "page_tokens: got 8; not a power of two"),
        (
            {"selector": "sparq"},
            'selector: got "sparq"; allowed: "exact" or "bounds" or "spread" or',
        ),
        (
            {"sparse": {"floor": 0.5}},
            "sparse.floor: 0.5 is more than sparse.budget (0.125): lower it, or raise the budget",
        ),
        ({"sparse": {"mass": 0}}, "sparse.mass: got 0; allowed: a number, above 0 and at most 1"),
        ({"selector": "bounds"}, 'selector: "bounds" needs mode "page"; mode "reuse" loads whole'),
        (
            {"sparse": {"budget": 1.5}},
            "sparse.budget: got 1.5; allowed: a number, above 0 and at most 1",
        ),
        ({"sparse": {"budget": 0}}, "sparse.budget: got 0; allowed: a number, above 0"),
        ({"sparse": {"budget_tokens": 0}}, "sparse.budget_tokens: got 0; allowed: an integer"),
        (
            {"mode": "page", "selector": "window", "sparse": {"budget_tokens": 256}},
            "sparse.budget_tokens: 256 is not more than hbm_window_tokens (256), which counts",
        ),
        ({"sparse": {"sink_tokens": -1}}, "sparse.sink_tokens: got -1; allowed: an integer"),
        ({"sparse": {"page_cache": "4KiB"}}, 'sparse.page_cache: got "4KiB"; allowed: a number'),
        ({"io": 5}, "io: got 5; allowed: an object with engine"),
        (
            {"io": {"engine": "aio"}},
            'io.engine: got "aio"; allowed: "auto" or "uring" or "threads"',
        ),
        ({"io": {"queue_depth": 0}}, "io.queue_depth: got 0; allowed: an integer, from 1 to 256"),
        ({"io": {"queue_depth": "4"}}, 'io.queue_depth: got "4"; allowed: an integer'),
        ({"io": {"queue_depth": True}}, "io.queue_depth: got true; allowed: an integer"),
        ({"io": {"deadline": 0.05}}, "io.deadline: got 0.05; allowed: a number, from 0.1 to 600"),
        ({"io": {"staging": "3MiB"}}, 'io.staging: got "3MiB"; allowed: a number of bytes'),
        ({"batch": {"max_file": None}}, "batch.max_file: got null; neither a number nor a text"),
        ({"io": {"direct": True}}, 'io.direct: got true; allowed: "auto" or "on" or "off"'),
        ({"io": {"faults": [{}]}}, 'io.faults[0].kind: missing; give "eio"'),
        ({"io": {"faults": [{"kind": "x"}]}}, 'io.faults[0].kind: got "x"; allowed: "eio"'),
        ({"io": {"faults": [{"kind": "latency"}]}}, 'io.faults[0]: got {"kind": "latency"}; fault'),
        ({"encryption": True}, "encryption: got true; allowed: an object with key_file, key_env"),
        ({"encryption": {}}, "encryption: got {}; no key given; give exactly one of key_file"),
        (
            {"encryption": {"key_env": "A", "key_file": "/a"}},
            'encryption: got {"key_env": "A", "key_file": "/a"}; key_file and key_env given; give',
        ),
        ({"encryption": {"key_file": ""}}, 'encryption.key_file: got ""; empty'),
        ({"encryption": {"key_env": ""}}, 'encryption.key_env: got ""; not the name of an env'),
        ({"encryption": {"key_env": "A=B"}}, 'encryption.key_env: got "A=B"; not the name'),
        (
            {"encryption": {"key_command": "vault read"}},
            'encryption.key_command: got "vault read"; allowed: a list of texts such as',
        ),
        ({"encryption": {"key_command": []}}, "encryption.key_command: got []; not a program"),
        ({"encryption": {"key_command": [5]}}, "encryption.key_command[0]: got 5"),
        (
            {"io": {"throttle": [{"bandwidth": "fast"}]}},
            'io.throttle[0].bandwidth: got "fast"; not a number',
        ),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(options: dict[str, object], line: str) -> None:
    lines = refused(options)
    assert len(lines) == 1
    assert lines[0].startswith(line)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"devcies": []}, "devcies: unknown option; did you mean devices?"),
        ({"Mode": "page"}, "Mode: unknown option; did you mean mode?"),
        ({"io": {"queue_dept": 1}}, "io.queue_dept: unknown option; did you mean io.queue_depth?"),
        ({"queue_depth": 1}, "queue_depth: unknown option; did you mean io.queue_depth?"),
        (
            {"devices": [{"path": "/a", "capcity": 1}]},
            "devices[0].capcity: unknown option; did you mean devices[0].capacity?",
        ),
        (
            {"devices": [{"path": "/a", "qqq": 1}]},
            "devices[0].qqq: unknown option; known here: path, capacity, weight, tbw, "
            "daily_write_budget",
        ),
    ],
)
def test_an_unknown_name_gets_the_nearest(options: dict[str, object], line: str) -> None:
    assert refused(options) == [line]


@pytest.mark.parametrize(("name", "value"), [("channel_dtype", "int8"), ("channel_group", 2)])
def test_an_option_that_was_removed_names_what_to_set(name: str, value: object) -> None:
    (line,) = refused({"mode": "page", "selector": "sparf", "sparse": {name: value}})
    assert line.startswith(f'sparse.{name}: was removed; selector "codes"')
    assert "sparse.code_bits" in line


def test_every_problem_is_told_at_once() -> None:
    lines = refused({"mode": 3, "oi": {}, "io": {"queue_depth": 0, "deadline": "x"}})
    assert [line.partition(":")[0] for line in lines] == [
        "mode",
        "io.queue_depth",
        "io.deadline",
        "oi",
    ]


@given(
    st.dictionaries(
        st.sampled_from([*SSDKVConfig.model_fields, "x"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.sampled_from(["path", "weight", "faults", "kind"]), inner)
            ),
            max_leaves=6,
        ),
        max_size=4,
    )
)
def test_whatever_is_given_there_is_a_config_or_a_config_error(options: dict[str, object]) -> None:
    try:
        made = build(options)
    except ConfigError as error:
        for line in str(error).splitlines()[1:]:
            assert line.partition(":")[0].strip(), "every line names its option"
    else:
        assert set(options) <= set(SSDKVConfig.model_fields)
        assert made == build(json.loads(json.dumps(options)))


def test_a_value_that_is_no_json_is_refused() -> None:
    with pytest.raises(ConfigError, match="a value of type object"):
        build({"mode": object()})


def test_long_values_are_cut() -> None:
    (line,) = refused({"mode": "x" * 10_000})
    assert len(line) < 250


# --- contradictions


def test_one_device_twice(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    lines = refused({"devices": [str(tmp_path), "/b", str(tmp_path / "link"), "/b/"]})
    assert [line.partition(":")[0] for line in lines] == ["devices[2].path", "devices[3].path"]
    assert "devices[0].path; give each device once" in lines[0]


def test_raw_devices_alone_need_a_state_dir(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(engine, "is_block_device", lambda path: path.startswith("/dev/"))
    assert refused({"devices": ["/dev/nvme9n1"]})[0].startswith("state_dir: missing")
    made = build({"devices": ["/dev/nvme9n1"], "state_dir": str(tmp_path)})
    assert made.state_path("m") == tmp_path
    mixed = build({"devices": ["/dev/nvme9n1", "/b"]})
    assert mixed.state_path("m") == Path("/b"), "the first device that is a directory"


def test_window_is_whole_pages() -> None:
    assert refused({"hbm_window_tokens": 80, "page_tokens": 32}) == [
        "hbm_window_tokens: 80 is not a multiple of page_tokens (32)"
    ]


def test_staging_that_is_given_fits_in_dram() -> None:
    page: dict[str, object] = {"mode": "page", "dram_gib": "32MiB"}
    (line,) = refused({**page, "io": {"staging": "64MiB"}})
    assert line.startswith("io.staging: 64 MiB is more than dram_gib")
    assert build({**page, "io": {"staging": "32MiB"}}).dram_bytes(1) == 32 * MIB


@pytest.mark.parametrize("staging", [{}, {"staging": "64MiB"}])
def test_reuse_mode_asks_for_no_staging(staging: dict[str, object]) -> None:
    made = build({"dram_gib": "8MiB", "io": staging})
    assert made.dram_bytes(1) == 8 * MIB
    assert made.dram_bytes(4) == 2 * MIB
    key = {"encryption": {"key_env": "KEY"}}
    assert build({"dram_gib": "8MiB", **key}).dram_bytes(4) == 2 * MIB
    if staging:
        assert refused({"dram_gib": "8MiB", "io": staging, **key})


def test_a_floor_that_is_not_given_follows_the_budget() -> None:
    page: dict[str, object] = {"mode": "page", "selector": "adaptive"}
    build({**page, "sparse": {"budget": 0.01}})
    (line,) = refused({**page, "sparse": {"budget": 0.01, "floor": 0.02}})
    assert line.startswith("sparse.floor: 0.02 is more than sparse.budget (0.01)")


@pytest.mark.parametrize("name", ["faults", "throttle"])
def test_rules_name_devices_that_exist(name: str) -> None:
    rule = {"device": 1} | ({"kind": "eio"} if name == "faults" else {})
    assert refused({"io": {name: [rule]}}) == [
        f"io.{name}[0].device: 1 is not a position in devices (1 entries)"
    ]
    build({"devices": ["/a", "/b"], "io": {name: [rule]}})


# --- what is found out later


def test_default_device_is_one_directory_per_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = build({})
    assert made.device_paths("abc") == (str(tmp_path / "ssdkv" / "abc"),)
    assert made.state_path("abc") == tmp_path / "ssdkv" / "abc"
    assert list(tmp_path.iterdir()) == [], "looking creates nothing"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert made.device_paths("abc") == (str(tmp_path / ".cache" / "ssdkv" / "abc"),)


def test_default_capacity_is_a_quarter_of_what_is_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(host, "free_bytes", lambda path: 100 * GIB)
    assert default_capacity(tmp_path / "not" / "yet") == 25 * GIB
    (tmp_path / "rank0.data").write_bytes(b"x" * (1 << 20))
    own = (tmp_path / "rank0.data").stat().st_blocks * 512
    assert default_capacity(tmp_path) == (100 * GIB + own) // 4, "our own files count as free"
    monkeypatch.setattr(host, "free_bytes", lambda path: 1000 * GIB)
    assert default_capacity(tmp_path) == 64 * GIB


def test_capacities_are_as_given_or_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(host, "free_bytes", lambda path: 100 * GIB)
    made = build({"devices": [{"path": "/a", "capacity": "32MiB"}, str(tmp_path)]})
    assert made.device_capacities("m") == (32 * MIB, 25 * GIB)
    monkeypatch.setattr(host, "free_bytes", lambda path: 60 * MIB)
    with pytest.raises(ConfigError, match="15 MiB, less than 16 MiB"):
        made.device_capacities("m")


def test_a_node_takes_no_deadline_below_a_second(tmp_path: Path) -> None:
    options = {"mode": "page", "nodes": ["unix:///n"], "state_dir": str(tmp_path)}
    build({**options, "io": {"deadline": 1}})
    with pytest.raises(ConfigError, match=r"io.deadline: 0.5 s is less than a node takes, 1 s"):
        build({**options, "io": {"deadline": 0.5}})


def test_free_space_of_a_path_that_does_not_exist_yet(tmp_path: Path) -> None:
    assert host.free_bytes(tmp_path / "a" / "b") > 0
    assert host.existing_parent(tmp_path / "a" / "b") == tmp_path


def test_default_dram_is_a_tenth_and_at_least_staging_that_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = build({})
    monkeypatch.setattr(engine, "available_memory", lambda: 20 * GIB)
    assert made.dram_bytes(2) == GIB
    monkeypatch.setattr(engine, "available_memory", lambda: 1000 * GIB)
    assert made.dram_bytes(1) == 4 * GIB
    monkeypatch.setattr(engine, "available_memory", lambda: 20 * MIB)
    assert made.dram_bytes(1) == 2 * MIB
    assert build({"mode": "page", "io": {"staging": "5MiB"}}).dram_bytes(1) == 5 * MIB


def test_default_dram_may_grow_to_what_blocks_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "available_memory", lambda: 20 * GIB)
    assert build({}).most_dram_bytes(2) == 5 * GIB
    assert build({"dram_gib": 1}).most_dram_bytes(2) == GIB // 2


def test_given_dram_is_shared_by_the_workers() -> None:
    made = build({"mode": "page", "dram_gib": 1, "io": {"staging": "64MiB"}})
    assert made.dram_bytes(4) == 256 * MIB
    with pytest.raises(ConfigError, match=r"1 GiB over 32 workers is 32 MiB each, .* \(64 MiB\)"):
        made.dram_bytes(32)


# --- the option tree


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.path)
def test_every_option_says_what_it_is_and_why(option: Option) -> None:
    assert option.description.rstrip(")").endswith(".")
    assert option.reason.endswith(".")
    assert option.allowed


def test_defaults_are_what_the_table_says() -> None:
    """Giving every documented default explicitly is the same as giving nothing."""
    given: dict[str, object] = {}
    for option in OPTIONS:
        absent = OFF.match(option.path)  # given as a whole, or not at all
        if "[]" in option.path or absent or option.default is None:
            continue
        target = given
        *groups, name = option.path.split(".")
        for group in groups:
            inner = target.setdefault(group, {})
            assert isinstance(inner, dict)
            target = inner
        target[name] = json.loads(option.default)
    assert build(given) == build({})
    assert set(given) == set(SSDKVConfig.model_fields)


# ---- nodes ----


def test_a_node_takes_the_place_of_a_store() -> None:
    config = SSDKVConfig.from_extra_config(
        {"nodes": ["unix:///run/s"], "load": "always", "io": {"deadline": 3.0}}
    )
    assert config.nodes == ("unix:///run/s",)
    assert config.node_keys is None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"devices": ["/mnt/a"]}, "devices: is an option of the node"),
        ({"dram_gib": 1}, "dram_gib: is an option of the node"),
        ({"admission": "second_use"}, "admission: is an option of the node"),
        ({"retain_share": 0.5}, "retain_share: is an option of the node"),
        ({"io": {"verify": "all", "deadline": 3.0}}, "io.verify: is an option of the node"),
        ({"nodes": ["unix:///a", "unix:///b"] * 2}, "nodes: unix:///a is given twice"),
        ({"replicas": 2}, "replicas: 2 nodes are to keep a block, one is given"),
    ],
)
def test_what_a_node_decides_is_refused(options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        SSDKVConfig.from_extra_config({"nodes": ["unix:///run/s"], **options})


def test_several_nodes_keep_each_block_as_often_as_is_asked() -> None:
    config = SSDKVConfig.from_extra_config({"nodes": ["unix:///a", "tcp://b:1"], "replicas": 2})
    assert (config.nodes, config.replicas) == (("unix:///a", "tcp://b:1"), 2)


def test_keys_of_no_node_are_refused() -> None:
    with pytest.raises(ConfigError, match="node_keys: has no meaning without nodes"):
        SSDKVConfig.from_extra_config({"node_keys": "/etc/keys"})
