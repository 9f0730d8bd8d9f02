"""Options of attention near storage: refusals name the option and a way out."""

from __future__ import annotations

import os

import pytest

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.config.engine import SSDKVConfig

PAGE = {"mode": "page"}
ALLOWED = 'allowed: "auto" or a number from 0 to 1'


def test_the_host_attends_where_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert SSDKVConfig.from_extra_config(PAGE).offload is None
    config = SSDKVConfig.from_extra_config({**PAGE, "offload": {}}).offload
    assert config is not None
    assert (config.kind, config.share, config.x_share) == ("host", "auto", 0)
    assert [config.threads_of(workers) for workers in (1, 2, 1000)] == [6, 3, 1]


@pytest.mark.parametrize("share", ["auto", 0, 1, 0.0, 0.25, 1.0])
def test_shares(share: float | str) -> None:
    options = {"share": share, "x_share": share}
    config = SSDKVConfig.from_extra_config({**PAGE, "offload": options}).offload
    assert config is not None
    assert (config.share, config.x_share) == (share, share)


@pytest.mark.parametrize("number", [0, 0.0])
def test_a_share_of_x_is_not_chosen_by_a_device_without_work(number: float) -> None:
    options = {"share": number, "x_share": "auto"}
    with pytest.raises(ConfigError, match=r'x_share "auto" with share 0: .* leave share out'):
        SSDKVConfig.from_extra_config({**PAGE, "offload": options})


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"offload": {}}, 'offload: needs mode "page"; .* leave offload out, or change the mode'),
        ({**PAGE, "offload": {"threads": 0}}, "offload.threads: got 0; allowed: an integer"),
        ({**PAGE, "offload": {"threads": 1000}}, "offload.threads: got 1000; this machine has "),
        (
            {**PAGE, "offload": {"kind": "npu"}},
            'offload.kind: got "npu"; allowed: "host" or "fpga" or "node"',
        ),
        (
            {**PAGE, "offload": {"kind": "no_such_package.npu:Device"}},
            'offload.kind: got "no_such_package.npu:Device"; .* cannot be imported',
        ),
        (
            {**PAGE, "offload": {"kind": "pathlib:Path"}},
            r'offload.kind: got "pathlib:Path"; pathlib:Path has no method close\(timeout_s\); it ',
        ),
        (
            {**PAGE, "offload": {"kind": "pathlib:path"}},
            'offload.kind: got "pathlib:path"; the module pathlib has no class path; allowed: ',
        ),
        (
            {**PAGE, "offload": {"backend": "csim"}},
            'offload: got .*; backend without kind "fpga": name it, or leave it out',
        ),
        (
            {**PAGE, "offload": {"kind": "fpga", "threads": 1}},
            'offload: got .*; threads beside kind "fpga", .* leave it out',
        ),
        (
            {**PAGE, "offload": {"kind": "fpga", "card": 1, "xclbin": "/a.xclbin"}},
            'offload: got .*; card, xclbin without backend "xrt": name it, or leave it out',
        ),
        (
            {**PAGE, "offload": {"kind": "fpga", "backend": "xrt"}},
            'offload: got .*; backend "xrt" without xclbin: name the file of the kernels',
        ),
        (
            {**PAGE, "offload": {"kind": "fpga", "peer": True}},
            "offload: got .*; peer with a share other than 1: whoever attends has to compare",
        ),
        (
            {**PAGE, "offload": {"kind": "fpga", "peer": True, "share": 1}, "page_tokens": 32},
            "offload.peer: the FPGA makes checksums of pages of 16 tokens, not of 32: leave it out",
        ),
        (
            {
                **PAGE,
                "offload": {"kind": "fpga", "peer": True, "share": 1},
                "encryption": {"key_file": "/key"},
            },
            "offload.peer: pages of an encrypted store come through the host's memory, .* leave it",
        ),
        (
            {**PAGE, "offload": {"kind": "fpga", "backend": "vitis"}},
            'offload.backend: got "vitis"; allowed: "csim" or "rtlsim" or "xrt"',
        ),
        *(
            ({**PAGE, "offload": {name: share}}, f"offload.{name}: got {text}; .*; {ALLOWED}$")
            for share, text in ((1.5, "1.5"), (-0.1, "-0.1"), ("half", '"half"'), (True, "true"))
            for name in ("share", "x_share")
        ),
        ({**PAGE, "offload": {"thread": 1}}, r"unknown option; did you mean offload\.threads"),
        (
            {**PAGE, "offload": {}, "selector": "bounds", "sparse": {"hbm_pages": "64MiB"}},
            "sparse.hbm_pages: with offload .* leave one of the two out",
        ),
        (
            {**PAGE, "offload": {"throttle": {"drives": 2, "dilation": 4}}},
            r"offload\.throttle: got .*; dilation, drives without a profile: name one, or ",
        ),
        (
            {**PAGE, "offload": {"throttle": {"profile": "instinfer", "latency": 0.1}}},
            r"offload\.throttle: got .*; latency beside a profile: leave one of the two out",
        ),
        (
            {**PAGE, "offload": {"throttle": {"profile": "instinfer", "drives": 9}}},
            r"offload\.throttle\.drives: got 9",
        ),
    ],
)
def test_contradictions_are_refused(options: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        SSDKVConfig.from_extra_config(options)
