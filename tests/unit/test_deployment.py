"""A deployment file is right, or every wrong field of it is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tritone.deployment import ENVIRONMENT, RESOLVED, Deployment, run_directory
from tritone.errors import InvalidArgument


def refusal(data: Any) -> str:
    with pytest.raises(InvalidArgument) as caught:
        Deployment.parse(data, "test.yaml")
    return caught.value.message


def test_an_empty_file_is_the_demo() -> None:
    deployment = Deployment.parse({}, "test.yaml")
    assert deployment.checkpoint == "demo:smollm2-135m-instruct"
    assert deployment.voice == "demo:heart"
    assert (deployment.page_size, deployment.max_context, deployment.prefill.dtype) == (32, 0, "auto")
    ports = (deployment.server.http_port, deployment.server.grpc_port, deployment.server.metrics_port)
    assert ports == (8000, 8001, 8002)


def test_values_at_their_borders() -> None:
    for page_size in (16, 32, 48, 64):
        assert Deployment.parse({"page_size": page_size}, "t").page_size == page_size
    assert Deployment.parse({"server": {"http_port": 0}}, "t").server.http_port == 0
    assert Deployment.parse({"server": {"http_port": 65535}}, "t").server.http_port == 65535
    assert Deployment.parse({"voice": None}, "t").voice is None
    assert Deployment.parse({"max_context": 32768}, "t").max_context == 32768


WRONG: list[tuple[str, Any, str]] = [
    ("page_size", 15, "15"),
    ("page_size", 65, "65"),
    ("page_size", 40, "multiple of 16"),
    ("page_size", "many", "'many'"),
    ("max_context", -1, "-1"),
    ("default_max_tokens", -1, "-1"),
    ("lease_seconds", 0, "0"),
    ("lease_seconds", float("nan"), "nan"),
    ("checkpoint", 5, "5"),
    ("checkpoint", None, "None"),
    ("prefill.device", "gpu", "'gpu'"),
    ("prefill.dtype", "float16", "'bfloat16'"),
    ("prefill.weights", "nvfp4", "'int4'"),
    ("decode.weights", "fp8_e5m2", "'fp8'"),
    ("decode.kv", "fp8_e5m2", "'fp8'"),
    ("decode.group", 0, "-1 (a whole row)"),
    ("decode.group", 12, "multiple of 8"),
    ("decode.group", 264, "above 256, of 256"),
    ("prefill.threads", -1, "-1"),
    ("prefill.threads", 513, "513"),
    ("decode.pool_tokens", 15, "15"),
    ("decode.max_sequences", 0, "0"),
    ("decode.max_sequences", 4097, "4097"),
    ("decode.max_batch_tokens", 15, "15"),
    ("decode.max_queue", 0, "0"),
    ("talker.threads", 0, "0"),
    ("talker.hidden_blocks", 15, "15"),
    ("voicebox.max_queue", 0, "0"),
    ("integrity.mode", "loud", "'off', 'raise' or 'log'"),
    ("integrity.mode", True, "'off', 'raise' or 'log'"),
    ("integrity.checksum", "crc", "boolean"),
    ("integrity.audit_seconds", -1, "-1"),
    ("integrity.transfer_seconds", 0, "0"),
    ("server.grpc_port", 65536, "65536"),
    ("server.metrics_port", -1, "-1"),
    ("server.exit_timeout_seconds", 0, "0"),
    ("server", "localhost", "'localhost'"),
    ("prefill", None, "None"),
]


@pytest.mark.parametrize(("field", "value", "hint"), WRONG)
def test_a_wrong_field_is_named_with_its_value(field: str, value: Any, hint: str) -> None:
    data: Any = value
    for part in reversed(field.split(".")):
        data = {part: data}
    message = refusal(data)
    lines = [line for line in message.splitlines() if line.startswith(f"  {field}:")]
    assert len(lines) == 1, message
    assert hint in lines[0]
    assert repr(value) in lines[0]


def test_dense_weights_and_activations_are_of_one_type() -> None:
    assert Deployment.parse({"decode": {"weights": "bf16"}}, "t").decode.weights == "bf16"
    message = refusal({"decode": {"weights": "bf16", "dtype": "float32"}})
    assert "weights: 'bf16' and dtype: 'float32' differ; allowed: dtype auto or bfloat16" in message


def test_all_wrong_fields_are_named_at_once() -> None:
    message = refusal({"page_size": 1, "decode": {"threads": -1}, "voise": "x"})
    assert message.startswith("test.yaml is not a valid deployment:\n")
    assert [line.split(":")[0].strip() for line in message.splitlines()[1:]] == [
        "page_size",
        "decode.threads",
        "voise",
    ]


def test_a_misspelt_field_is_answered_with_the_right_ones() -> None:
    assert "checkpoint, decode, default_max_tokens" in refusal({"chekpoint": "x"})
    message = refusal({"decode": {"thread": 1}})
    assert "decode.thread: 1: no such field; allowed: checkpoint, device, dtype, group, kv, max_batch_tokens" in message


@pytest.mark.parametrize("data", [None, [], "text", 5])
def test_a_deployment_is_a_mapping(data: Any) -> None:
    assert f"test.yaml: a deployment is a mapping of fields, found {type(data).__name__}" == refusal(data)


def test_keys_are_names() -> None:
    assert "1" in refusal({1: 2})


@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_a_request_of_full_length_fits_into_each_pool(stage: str) -> None:
    assert Deployment.parse({"max_context": 4096, stage: {"pool_tokens": 4096}}, "t").max_context == 4096
    message = refusal({"max_context": 4097, stage: {"pool_tokens": 4096}})
    assert "max_context: 4097" in message
    assert f"{stage}.pool_tokens: 4096" in message


@pytest.mark.parametrize(
    "data",
    [
        # 31 whole pages of 32 tokens hold 992 tokens, not 1000.
        {"page_size": 32, "max_context": 1000, "decode": {"pool_tokens": 1000}},
        # A pool smaller than one page has no page at all.
        {"page_size": 64, "max_context": 16, "prefill": {"pool_tokens": 16}},
    ],
)
def test_pools_are_counted_in_whole_pages(data: Any) -> None:
    assert "pool_tokens" in refusal(data)


def test_an_unknown_fault_is_refused_with_the_list() -> None:
    message = refusal({"integrity": {"mode": "raise", "faults": ["rust"]}})
    assert "integrity.faults.0: 'rust'" in message and "'stale_tag', 'swapped_pages'" in message


def test_checks_are_off_unless_written_and_on_in_the_projects_deployments(tmp_path: Path) -> None:
    assert Deployment.parse({}, "t").integrity.mode == "off"
    for path in (Path(__file__).parents[2] / "deployments").glob("*.yaml"):
        assert Deployment.load(path).integrity.mode == "raise", path
    path = tmp_path / "mine.yaml"
    path.write_text("integrity: {mode: off}\n")  # a boolean to YAML
    assert Deployment.load(path).integrity.mode == "off"


def test_digests_need_a_mode_that_looks_at_them() -> None:
    assert "checksum: true needs mode raise or log; mode is 'off'" in refusal({"integrity": {"checksum": True}})


def test_a_deployment_cannot_be_changed() -> None:
    deployment = Deployment.parse({}, "t")
    with pytest.raises(ValueError, match="frozen"):
        deployment.page_size = 16
    with pytest.raises(ValueError, match="frozen"):
        deployment.decode.threads = 3


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\ndecode:\n  threads: 3\n")
    deployment = Deployment.load(path)
    assert (deployment.name, deployment.decode.threads) == ("mine", 3)
    path.write_text("")
    with pytest.raises(InvalidArgument, match=r"mine\.yaml: a deployment is a mapping"):
        Deployment.load(path)
    for broken in ("a: [", "a: b: c", "\ta: 1", "a: \x07"):
        path.write_text(broken)
        with pytest.raises(InvalidArgument, match="is not YAML"):
            Deployment.load(path)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"name: \xff\xfe")
    with pytest.raises(InvalidArgument, match=r"mine\.yaml"):
        Deployment.load(path)


def test_a_missing_file_is_answered_with_those_beside_it(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("")
    (tmp_path / "two.yaml").write_text("")
    with pytest.raises(InvalidArgument, match=r"'.*three\.yaml' is no file; found beside it: one, two$"):
        Deployment.load(tmp_path / "three.yaml")
    with pytest.raises(InvalidArgument, match="found beside it: none$"):
        Deployment.load(tmp_path / "nowhere" / "three.yaml")
    with pytest.raises(InvalidArgument, match="is no file"):
        Deployment.load(tmp_path)


def test_stages_read_what_the_supervisor_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Deployment.parse(
        {"name": "resolved", "max_context": 2048, "voice": None, "prefill": {"threads": 2}}, "t"
    )
    (tmp_path / RESOLVED).write_text(before.model_dump_json())
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path))
    assert Deployment.from_environment() == before
    assert run_directory() == tmp_path
    (tmp_path / RESOLVED).write_text(json.dumps({"pages": 1}))
    with pytest.raises(InvalidArgument, match="pages"):
        Deployment.from_environment()


@pytest.mark.parametrize("value", [None, ""])
def test_a_stage_outside_a_server_says_so(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    if value is not None:
        monkeypatch.setenv(ENVIRONMENT, value)
    with pytest.raises(InvalidArgument, match=f"{ENVIRONMENT} is not set"):
        run_directory()


def test_the_projects_own_deployments_are_valid() -> None:
    paths = sorted((Path(__file__).parents[2] / "deployments").glob("*.yaml"))
    assert paths
    for path in paths:
        Deployment.load(path)
