"""Flags, environment and file become one frozen model, or one clear line."""

import os
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import ClassVar, Literal

import pytest
from pydantic import BaseModel, ByteSize, Field

from batch_server.config import BatchServerConfig
from decode_worker.config import DecodeWorkerConfig
from diptych import settings
from diptych.byte_size import SizeInBytes
from diptych.errors import ConfigurationError
from diptych.process import ProcessConfig
from prefill_worker.config import PrefillWorkerConfig
from router.config import RouterConfig
from soft_worker.config import SoftWorkerConfig


class ExampleConfig(ProcessConfig):
    """An example."""

    role: ClassVar[str] = "example"

    pool: SizeInBytes = Field(ByteSize(2**30), description="Memory.")
    transports: tuple[Literal["nixl", "inline"], ...] = Field(
        ("nixl", "inline"), description="Transports."
    )
    prefill: list[str] = Field([], description="host:port of a worker.")
    share: list[float] = Field([], description="Shares.")


def load(*args: str) -> ExampleConfig:
    return settings.load(
        ExampleConfig, list(args), prog="diptych example", env_prefix="DIPTYCH_EXAMPLE_"
    )


def test_flags_over_environment_over_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("listen: a:1\nlog_level: error\ntimers: {drain_s: 3}\n")
    monkeypatch.setenv("DIPTYCH_EXAMPLE_LOG_LEVEL", "warning")
    monkeypatch.setenv("DIPTYCH_EXAMPLE_METRICS_PORT", "1")
    config = load("--config", str(path), "--metrics-port", "2", "--timers.accept-s", "0.7")
    assert (config.listen, config.log_level, config.metrics_port) == ("a:1", "warning", 2)
    assert (config.timers.drain_s, config.timers.accept_s) == (3, 0.7)
    assert type(config) is ExampleConfig


def test_the_file_may_be_a_pipe() -> None:
    """As a shell's ``--config <(decrypt settings.yaml)`` is one: its content comes once."""
    reading, writing = os.pipe()
    try:
        os.write(writing, b"listen: a:1\n")
        os.close(writing)
        assert load("--config", f"/dev/fd/{reading}").listen == "a:1"
    finally:
        os.close(reading)


def test_a_variable_may_name_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named, other = tmp_path / "named.yaml", tmp_path / "other.yaml"
    named.write_text("listen: a:1\n")
    other.write_text("listen: b:1\n")
    monkeypatch.setenv("DIPTYCH_EXAMPLE_CONFIG", str(named))
    assert load().listen == "a:1"
    assert load("--config", str(other)).listen == "b:1"
    monkeypatch.setenv("DIPTYCH_EXAMPLE_CONFIG", str(tmp_path / "none.yaml"))
    with pytest.raises(ConfigurationError, match=r"--config: .*none\.yaml: No such file"):
        load()


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_the_file_is_unicode_whatever_the_locale_says(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("prefill: [é:1]\n", encoding=encoding)
    assert load("--config", str(path)).prefill == ["é:1"]


def test_a_switch_is_on_or_off(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("stop_with_stdin: on\nmetrics_port: null\n")
    config = load("--config", str(path))
    assert (config.stop_with_stdin, config.metrics_port) == (True, None)


def test_a_list_flag_repeats() -> None:
    assert load("--prefill", "a:1", "--prefill", "b:2").prefill == ["a:1", "b:2"]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64MiB", 2**26),
        ("64Mi", 2**26),  # as Kubernetes writes it, and the chart's other values
        ("1.5 Gi", 3 * 2**29),
        ("2Ki", 2**11),
        ("1Ti", 2**40),
        ("64M", 64 * 10**6),
        ("64", 64),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert load("--pool", text).pool == size


def test_tuples() -> None:
    assert load("--transports", "inline,nixl").transports == ("inline", "nixl")
    assert load("--transports", "inline").transports == ("inline",)


def test_a_model_built_in_code_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_EXAMPLE_LISTEN", "elsewhere:1")
    assert ExampleConfig().listen == "127.0.0.1:0"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--nope", "1"], "unrecognized arguments: --nope 1"),
        (["--listen"], "--listen: expected one argument"),
        (["--metrics-port", "99999"], "--metrics-port: .* 65535 .*'99999'"),
        (["--transports", "pigeon"], "^--transports: .*'pigeon'[^;]*$"),
        (["--timers.drain-s", "soon"], "--timers.drain-s: .*'soon'"),
        (["--timers.heartbeat-s", "5"], r"^--timers: lost_peer_s \(4.5\) .* heartbeat_s \(5.0\)"),
        (["--timers.lost-peer-s", "1.5"], r"^--timers: lost_peer_s \(1.5\) .* heartbeat_s \(1.0\)"),
        (["--config", "/nonexistent.yaml"], "--config: /nonexistent.yaml: No such file"),
        (["--share", "nan"], "^--share: expected values as JSON has them, .*'nan'"),
        (["--share", "1", "--share", ".5"], "^--share: .* such as 0.5 .*'1,.5'"),
        (["--share", "1e400"], "^--share: .*finite"),
        (["--pool", "40Gx"], r"^--pool: expected a size such as 40GiB \(got '40Gx'\)$"),
        (["--pool", "Gi"], "^--pool: expected a size such as 40GiB"),
        (["--pool=-1Gi"], "^--pool: expected a size such as 40GiB"),
    ],
)
def test_a_bad_setting_is_one_line_that_names_it(args: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        load(*args)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("nope: 1", "--nope: no such setting"),
        ("timers: {nope: 1}", "--timers.nope: no such setting"),
        ("- 1", "expected settings as"),
        ("a: [", "is not YAML"),
        ("[a]: 1", "is not YAML"),
        ("listen: a:1\n8000: x", "settings.yaml: line 2: 8000 is not text, and names no setting"),
        ("on: x", "line 1: on is not text"),
        ("timers: {null: 1}", "line 1: null is not text"),
        ("listen: a:1\nlisten: b:1", "line 2: listen is there twice"),
        ("timers:\n  drain_s: 3\n  drain_s: 4", "line 3: drain_s is there twice"),
        ("<<: {1: x}", "line 1: 1 is not text"),
        ("metrics_port: off", "--metrics-port: cannot be on or off, yes or no \\(got False\\)"),
        ("timers: {drain_s: yes}", "--timers.drain-s: cannot be on or off"),
        ("pool: on", "--pool: cannot be on or off"),
        ("pool: 1,5GiB", "--pool: expected a size such as 40GiB"),
        ("pool: 40 GiB or so", "--pool: expected a size such as 40GiB"),
        ("listen: 2026-13-45", "is not YAML: month must be"),
        ("config: other.yaml", "config: one file names no other"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(content)
    with pytest.raises(ConfigurationError, match=message) as caught:
        load("--config", str(path))
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("name", "value"), [("LISTNE", "a:1"), ("METRCS_PORT", "9090"), ("PORT", "9090")]
)
def test_an_unknown_variable_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(f"DIPTYCH_EXAMPLE_{name}", value)
    with pytest.raises(ConfigurationError, match=f"DIPTYCH_EXAMPLE_{name}: no such setting"):
        load()


@pytest.mark.parametrize(("name", "value"), [("PREFILL", "a:1,b:2"), ("TIMERS", "{drain_s: 3}")])
def test_a_variable_that_has_to_be_json_and_is_not_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(f"DIPTYCH_EXAMPLE_{name}", value)
    with pytest.raises(ConfigurationError) as caught:
        load()
    assert caught.value.message == (
        f"environment: DIPTYCH_EXAMPLE_{name}: expected JSON, "
        f"""as ["a", "b"] or {{"name": 1}} (got {value!r})"""
    )


@pytest.mark.parametrize(
    "role",
    [RouterConfig, PrefillWorkerConfig, DecodeWorkerConfig, SoftWorkerConfig, BatchServerConfig],
)
def test_no_number_of_any_role_may_be_infinite(role: type[ProcessConfig]) -> None:
    flags = dict(numbers(role))
    assert "--timers.drain-s" in flags
    assert [flag for flag, is_finite in flags.items() if not is_finite] == []


def numbers(model: type[BaseModel], above: str = "--") -> Iterator[tuple[str, bool]]:
    """Each setting that is no whole number, and whether it has to be finite."""
    is_finite = model.model_config.get("allow_inf_nan") is False
    for name, field in model.model_fields.items():
        kind, flag = field.annotation, above + name.replace("_", "-")
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from numbers(kind, f"{flag}.")
        elif "float" in str(kind):
            yield flag, is_finite


def test_what_kubernetes_injects_for_a_service_is_not_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DIPTYCH_EXAMPLE_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("DIPTYCH_EXAMPLE_PORT", "tcp://10.0.0.1:50051")
    monkeypatch.setenv("DIPTYCH_EXAMPLE_SERVICE_PORT", "50051")
    monkeypatch.setenv("DIPTYCH_EXAMPLE_PORT_50051_TCP_ADDR", "10.0.0.1")
    monkeypatch.setenv("DIPTYCH_EXAMPLE_PORT_50051_TCP_PORT", "50051")
    load()


def test_help_shows_units_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load("--help")
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "usage: diptych example [SETTINGS] An example." in text
    assert "--timers.drain-s X On SIGTERM, running work may finish within this, s." in text
    assert "(default: 20.0)" in text
    assert "--pool SIZE Memory. (default: 1.0GiB)" in text
    assert "--transports {nixl,inline} Transports. (default: nixl,inline)" in text
    assert "None" not in text
    assert "\0" not in text


class Form(StrEnum):
    PLAIN = "plain"
    TWO_PARTS = "two-parts"


class WithForms(ExampleConfig):
    """Forms."""

    form: Form = Field(Form.TWO_PARTS, description="Form.")
    other: Form | None = Field(None, description="Other.")
    element: Literal["auto"] | Literal["int8", "fp8"] = Field("auto", description="Element.")
    bias: dict[int, float] = Field({}, description="Bias.")
    first: list[str] = Field(["a", "b"], description="First.")


def test_help_shows_values_as_files_and_variables_take_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as Python has them: a name of an enum's member is refused there."""

    def load(*args: str) -> WithForms:
        return settings.load(
            WithForms, list(args), prog="diptych example", env_prefix="DIPTYCH_EXAMPLE_"
        )

    with pytest.raises(SystemExit):
        load("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "--form {plain,two-parts} Form. (default: two-parts)" in text
    assert "--other {plain,two-parts} Other. --" in text
    assert "--element {auto,int8,fp8} Element. (default: auto)" in text
    assert "--bias N=X Bias. --" in text
    assert "--first TEXT First. Repeatable. (default: a,b)" in text
    monkeypatch.setenv("DIPTYCH_EXAMPLE_FORM", "plain")
    told = load("--other", "two-parts", "--bias", "1=2")
    assert (told.form, told.other, told.bias) == (Form.PLAIN, Form.TWO_PARTS, {1: 2.0})


def test_a_number_is_unset_by_no_word() -> None:
    for word in ("None", "null"):
        with pytest.raises(ConfigurationError, match=r"--metrics-port: .*valid integer"):
            load("--metrics-port", word)


def test_what_kubernetes_says_of_a_service_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_EXAMPLE_METRICS_PORT", "tcp://10.0.0.1:9090")
    assert load().metrics_port is None
    assert load("--metrics-port", "7").metrics_port == 7
    monkeypatch.setenv("DIPTYCH_EXAMPLE_METRICS_PORT", "tcp")
    with pytest.raises(ConfigurationError, match="metrics-port"):
        load()


@pytest.mark.parametrize(
    ("args", "flag"),
    [
        (["--otlp-endpoint", "a\udcff"], "--otlp-endpoint"),
        (["--prefill", "b,a\udcff"], "--prefill"),
    ],
)
def test_what_is_no_utf8_is_refused_and_nothing_of_it_said(args: list[str], flag: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        load(*args)
    assert raised.value.message == f"{flag}: is no UTF-8"


def test_the_name_of_a_file_need_not_be_utf8() -> None:
    path = "/tmp/\udcff.pem"
    files = ("--tls.certificate", path, "--tls.key", path, "--tls.ca", path)
    assert str(load(*files).tls.certificate) == path
