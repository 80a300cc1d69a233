"""Whatever the chart names of the program exists: flags, settings, ports, health services, metrics.

The program's own code reads what the chart would give it; nothing is started.
"""

import hashlib
import importlib.util
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from decode_worker.config import DecodeWorkerConfig
from diptych import __version__, settings
from diptych.cli.commands import COMMANDS
from diptych.cli.generate import GenerateConfig
from diptych.process import ProcessConfig
from diptych.timers import Timers
from diptych.v1 import decode_pb2, inference_pb2, prefill_pb2, worker_pb2
from prefill_worker.config import PrefillWorkerConfig
from router.config import RouterConfig
from router.discovery.choice import choose
from router.discovery.dns import DnsDiscovery
from router.discovery_settings import DnsSource, KubernetesSource
from soft_worker.config import SoftWorkerConfig
from tests.unit.deploy.chart import (
    CHART,
    DIGEST,
    NAMESPACE,
    ROOT,
    VALUES,
    Pod,
    all_pods,
    chart_digest,
    named,
    pods,
    rendered,
    servers,
    settings_text,
)

CONFIGS: dict[str, type[ProcessConfig]] = {
    "router": RouterConfig,
    "prefill": PrefillWorkerConfig,
    "decode": DecodeWorkerConfig,
    "worker": SoftWorkerConfig,
}
SERVICES = {
    "router": inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name,
    "prefill": prefill_pb2.DESCRIPTOR.services_by_name["Prefill"].full_name,
    "decode": decode_pb2.DESCRIPTOR.services_by_name["Decode"].full_name,
    "worker": worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name,  # of whichever role
}
# What else the containers' environment holds: read by libraries of ours, or by another variable.
LIBRARIES = {
    "HF_HOME": "huggingface_hub.constants",
    "HF_TOKEN_PATH": "huggingface_hub.constants",
    "NUMBA_CACHE_DIR": "diptych.code_cache",
    "OTEL_RESOURCE_ATTRIBUTES": "opentelemetry.sdk.environment_variables",
}


def config_of(pod: Pod, tmp_path: Path) -> ProcessConfig:
    """What the process in ``pod`` makes of its arguments and its file of settings."""
    path = tmp_path / "settings.yaml"
    path.write_text(settings_text(pod))
    role, *args = pod.container["args"]
    args = [arg.replace("/etc/diptych/settings.yaml", str(path)) for arg in args]
    return settings.load(
        CONFIGS[role], args, prog=f"diptych {role}", env_prefix=f"DIPTYCH_{role.upper()}_"
    )


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_the_manifests_are_of_this_chart() -> None:
    assert DIGEST.read_text().strip() == chart_digest(), "run `make manifests`"


def test_every_pod_runs_a_command_that_exists() -> None:
    commands = {command.name for command in COMMANDS}
    assert {pod.command for pod in all_pods()} <= commands
    assert {pod.command for pod in servers()} == set(CONFIGS)
    assert all(pod.container["command"] == ["diptych"] for pod in all_pods())


@pytest.mark.parametrize("pod", servers(), ids=lambda pod: pod.where)
def test_the_program_takes_its_settings(pod: Pod, tmp_path: Path) -> None:
    config = config_of(pod, tmp_path)
    ports = {port["name"]: port["containerPort"] for port in pod.container["ports"]}
    assert port_of(config.listen) == ports["grpc"]
    assert config.metrics_port == ports["metrics"]
    if isinstance(config, RouterConfig):
        assert (config.http_port if config.http else None) == ports.get("http")
    mounts = {mount["mountPath"] for mount in pod.container["volumeMounts"]}
    assert "/cache" in mounts
    assert getattr(config, "cache_dir") == Path("/cache")  # noqa: B009 - each role has its own
    secrets = {"/etc/tls", "/etc/public-tls", "/etc/api-keys", "/etc/hub-token"}
    assert mounts - secrets <= {"/etc/diptych", "/cache", "/tmp", "/model", "/dev/shm", "/extra"}


def secret_files(config: ProcessConfig) -> set[Path]:
    """What a process reads of its secrets."""
    found = [config.tls.certificate, config.tls.key, config.tls.ca]
    if isinstance(config, RouterConfig):
        found += [config.public_tls.certificate, config.public_tls.key, config.api_keys]
    return {path for path in found if path is not None}


@pytest.mark.parametrize("pod", servers(), ids=lambda pod: pod.where)
def test_secrets_are_files_that_are_mounted(pod: Pod, tmp_path: Path) -> None:
    """All of them or none; as files, whole, so that what is renewed arrives."""
    config = config_of(pod, tmp_path)
    mounts = {mount["mountPath"]: mount for mount in pod.container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
    is_locked = pod.where.startswith("everything")
    num_files = (6 if isinstance(config, RouterConfig) else 3) if is_locked else 0
    files = secret_files(config)
    assert len(files) == num_files
    for path in files:
        mount = mounts[str(path.parent)]
        assert "subPath" not in mount
        assert mount["readOnly"] is True
        secret = volumes[mount["name"]]["secret"]
        items = secret.get("items")
        names = {"tls.crt", "tls.key", "ca.crt"} if items is None else {i["path"] for i in items}
        assert path.name in names


@pytest.mark.parametrize("pod", all_pods(), ids=lambda pod: pod.where)
def test_no_variable_holds_a_secret(pod: Pod) -> None:
    """A hub's token is a file: variables are told to whoever looks at a process."""
    variables = {each["name"]: each for each in pod.container["env"]}
    assert not any("secretKeyRef" in each.get("valueFrom", {}) for each in variables.values())
    assert "envFrom" not in pod.container
    if not pod.where.startswith("everything") or pod.command == "generate":
        assert "HF_TOKEN_PATH" not in variables
        return
    path = Path(variables["HF_TOKEN_PATH"]["value"])
    (mount,) = [m for m in pod.container["volumeMounts"] if m["mountPath"] == str(path.parent)]
    (volume,) = [v for v in pod.spec["volumes"] if v["name"] == mount["name"]]
    assert mount["readOnly"] is True
    assert volume["secret"]["secretName"] == "hub"
    assert volume["secret"]["items"] == [{"key": "token", "path": path.name}]


@pytest.mark.parametrize("pod", servers(), ids=lambda pod: pod.where)
def test_probes_need_neither_certificate_nor_key(pod: Pod, tmp_path: Path) -> None:
    """Where the process asks for either, its health has a port that asks for nothing."""
    config = config_of(pod, tmp_path)
    is_locked = config.tls.certificate is not None
    if isinstance(config, RouterConfig):
        is_locked = config.has_tenants or config.public_tls.certificate is not None
    ports = {port["name"]: port["containerPort"] for port in pod.container["ports"]}
    assert (config.health_port is not None) is is_locked
    assert config.health_port == ports.get("health")
    probed = config.health_port if is_locked else port_of(config.listen)
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert pod.container[probe]["grpc"]["port"] == probed


def test_renderings_have_each_way_to_lock_a_router(tmp_path: Path) -> None:
    """Else the test above would say nothing of it."""
    routers = {p.where.partition(":")[0]: p for p in servers() if p.command == "router"}
    configs = {name: config_of(pod, tmp_path) for name, pod in routers.items()}
    locked = {
        name: (config.public_tls.certificate, config.api_keys, config.jwt.issuer)
        for name, config in configs.items()
        if isinstance(config, RouterConfig) and config.health_port is not None
    }
    assert locked == {
        "everything": (Path("/etc/public-tls/tls.crt"), Path("/etc/api-keys/keys"), None),
        "jwt": (None, None, "https://login.example.com"),
    }


def test_each_role_has_a_certificate_of_its_own_name(tmp_path: Path) -> None:
    made = {
        m["spec"]["secretName"]: m["spec"]
        for m in rendered("everything")
        if m["kind"] == "Certificate"
    }
    for pod in [pod for pod in servers() if pod.where.startswith("everything")]:
        config = config_of(pod, tmp_path)
        (volume,) = [v for v in pod.spec["volumes"] if v["name"] == "tls"]
        spec = made[volume["secret"]["secretName"]]
        roles = list(config.roles) if isinstance(config, SoftWorkerConfig) else [pod.command]
        assert {f"{role}.{config.tls.domain}" for role in roles} <= set(spec["dnsNames"])
        assert {"server auth", "client auth"} <= set(spec["usages"])
    names = sorted(tuple(spec["dnsNames"]) for spec in made.values())
    assert names == [
        ("decode.llm.example", "prefill.llm.example"),  # a pool of decode has workers of both roles
        ("prefill.llm.example",),
        ("router.llm.example",),
    ]


@pytest.mark.parametrize("pod", servers(), ids=lambda pod: pod.where)
def test_probes_ask_for_what_the_program_serves(pod: Pod) -> None:
    """Liveness and the start ask for the process, readiness for its service: two names."""
    container = pod.container
    ports = {p["name"]: p["containerPort"] for p in container["ports"]}
    port = ports.get("health", ports["grpc"])  # probes speak no TLS
    assert container["readinessProbe"]["grpc"] == {"port": port, "service": SERVICES[pod.command]}
    for probe in ("livenessProbe", "startupProbe"):
        assert container[probe]["grpc"] == {"port": port}


@pytest.mark.parametrize("pod", servers(), ids=lambda pod: pod.where)
def test_nobody_is_killed_while_it_drains(pod: Pod, tmp_path: Path) -> None:
    timers = config_of(pod, tmp_path).timers
    pre_stop_s = 0.0
    if "lifecycle" in pod.container:
        command = pod.container["lifecycle"]["preStop"]["exec"]["command"]
        assert command[0] == "sleep"
        pre_stop_s = float(command[1])
    drain_s = pre_stop_s + 2 * timers.lame_duck_s + timers.drain_s
    if pod.command == "router":
        drain_s += timers.leave_s
    assert pod.spec["terminationGracePeriodSeconds"] >= drain_s + 10


@pytest.mark.parametrize("pod", servers(), ids=lambda pod: pod.where)
def test_what_kubernetes_says_of_services_changes_nothing(
    pod: Pod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chart turns such variables off; a release called diptych would have these."""
    config = config_of(pod, tmp_path)
    for service in ("router", "router_metrics", "prefill", "prefill_main", "decode"):
        name = f"DIPTYCH_{service.upper()}"
        address = "tcp://10.0.0.1:50051"
        for end, value in (
            ("SERVICE_HOST", "10.0.0.1"),
            ("SERVICE_PORT", "50051"),
            ("SERVICE_PORT_GRPC", "50051"),
            ("PORT", address),
            ("PORT_50051_TCP", address),
            ("PORT_50051_TCP_PROTO", "tcp"),
            ("PORT_50051_TCP_PORT", "50051"),
            ("PORT_50051_TCP_ADDR", "10.0.0.1"),
        ):
            monkeypatch.setenv(f"{name}_{end}", value)
    assert config_of(pod, tmp_path) == config


def test_the_template_has_the_programs_defaults() -> None:
    """Where values say nothing: for the grace period, KEDA's threshold and the test's flags."""
    text = (CHART / "templates" / "_pods.tpl").read_text()
    for name in ("drain_s", "lame_duck_s", "leave_s"):
        (default,) = re.findall(rf"ternary \$timers\.{name} ([\d.]+) ", text)
        assert float(default) == Timers.model_fields[name].default
    text = (CHART / "templates" / "_scaling.tpl").read_text()
    (places,) = re.findall(r"ternary \$settings\.max_num_seqs ([\d.]+) ", text)
    assert float(places) == PrefillWorkerConfig.model_fields["max_num_seqs"].default
    text = (CHART / "templates" / "_pools.tpl").read_text()
    for name in ("trace_caller_per_s", "trace_sample_ratio"):
        (default,) = re.findall(rf"ternary \$settings\.{name} ([\d.]+) ", text)
        assert float(default) == RouterConfig.model_fields[name].default


def test_the_alert_of_a_stale_source_waits_for_twice_its_period(tmp_path: Path) -> None:
    text = (CHART / "alerts.yaml").read_text()
    (dns, kubernetes) = re.findall(
        r"ternary \(default ([\d.]+) \$dns\.interval_s\) ([\d.]+) ", text
    )[0]
    assert float(dns) == DnsSource.model_fields["interval_s"].default
    assert float(kubernetes) == KubernetesSource.model_fields["relist_s"].default
    (router,) = [pod for pod in pods("everything") if pod.command == "router"]
    config = config_of(router, tmp_path)
    assert isinstance(config, RouterConfig)
    assert config.discovery == "kubernetes"
    (expr,) = [r["expr"] for r in _rules() if r["alert"] == "DiptychDiscoveryIsStale"]
    assert float(expr.partition(" > ")[2]) == 2 * config.kubernetes.relist_s


@pytest.mark.parametrize("pod", all_pods(), ids=lambda pod: pod.where)
def test_every_variable_is_read_by_something(pod: Pod) -> None:
    variables = pod.container.get("env", [])
    used = json.dumps([pod.container["args"], [v.get("value") for v in variables]])
    for variable in variables:
        name = variable["name"]
        known = name in LIBRARIES or name in {"OMP_NUM_THREADS"} or f"$({name})" in used
        assert known, f"{pod.where}: {name}"


def test_variables_of_libraries_are_theirs() -> None:
    for name, module in LIBRARIES.items():
        spec = importlib.util.find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        assert name in Path(spec.origin).read_text()


def services_of_pools(rendering: str) -> dict[str, set[str]]:
    """The headless services that name the pods of each pool, by role."""
    found: dict[str, set[str]] = {"prefill": set(), "decode": set()}
    for pod in pods(rendering):
        if pod.manifest["kind"] != "StatefulSet":
            continue
        service = named(rendered(rendering), "Service", pod.manifest["spec"]["serviceName"])
        (port,) = service["spec"]["ports"]
        assert port["name"] == "grpc"
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["publishNotReadyAddresses"] is True, "a worker drains under its name"
        assert service["spec"]["selector"].items() <= pod.labels.items()
        assert {"name": "grpc", "containerPort": port["port"]} in pod.container["ports"]
        found[pod.labels["app.kubernetes.io/component"]].add(service["metadata"]["name"])
    return found


@pytest.mark.parametrize("name", VALUES)
def test_the_router_asks_for_every_pool(name: str, tmp_path: Path) -> None:
    (router,) = [pod for pod in pods(name) if pod.command == "router"]
    config = config_of(router, tmp_path)
    assert isinstance(config, RouterConfig)
    expected = services_of_pools(name)
    assert expected["decode"]
    assert config.discovery == ("kubernetes" if name in {"everything", "cpu", "rdma"} else "dns")
    if config.discovery == "kubernetes":
        assert config.kubernetes.port == "grpc"
        assert set(config.kubernetes.prefill) == expected["prefill"]
        assert set(config.kubernetes.decode) == expected["decode"]
    else:
        assert isinstance(choose(config, time.monotonic), DnsDiscovery)
        domain = f"{NAMESPACE}.svc.cluster.local"
        for role, asked in (("prefill", config.dns.prefill), ("decode", config.dns.decode)):
            assert set(asked) == {f"_grpc._tcp.{service}.{domain}" for service in expected[role]}


@pytest.mark.parametrize("name", VALUES)
def test_other_settings_restart_what_reads_them(name: str) -> None:
    """They are read at start: their checksum is part of the pod."""
    for pod in [pod for pod in servers() if pod.where.startswith(f"{name}:")]:
        annotations = pod.manifest["spec"]["template"]["metadata"]["annotations"]
        text = settings_text(pod).rstrip("\n")
        assert annotations["checksum/settings"] == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("name", VALUES)
def test_the_test_asks_the_router_for_a_handoff(name: str, tmp_path: Path) -> None:
    (test,) = [pod for pod in pods(name) if pod.command == "generate"]
    config = settings.load(
        GenerateConfig,
        [str(arg) for arg in test.container["args"][1:]],
        prog="diptych generate",
        env_prefix="DIPTYCH_GENERATE_",
    )
    has_prefill = any(pod.command == "prefill" for pod in pods(name))
    assert config.expect_handoff is has_prefill
    assert has_prefill is (name != "gpu")
    mounts = {mount["mountPath"] for mount in test.container.get("volumeMounts", [])}
    files = [path for path in (config.ca, config.api_key_file) if path is not None]
    assert {str(path.parent) for path in files} == mounts
    (router,) = [config_of(pod, tmp_path) for pod in pods(name) if pod.command == "router"]
    assert isinstance(router, RouterConfig)
    assert (config.ca is not None) is (router.public_tls.certificate is not None)
    assert (config.api_key_file is not None) is router.has_tenants
    message = config.message or ""
    assert message.startswith("Run $(POD_UID)."), "nothing of it is cached"
    # At least a token for each word: the router would not ship a shorter prompt.
    local_below = RouterConfig.model_fields["local_prefill_below_tokens"].default
    assert len(message.split()) > 2 * local_below
    host, _, port = config.address.partition(":")
    (service,) = [
        m for m in rendered(name) if m["kind"] == "Service" and m["metadata"]["name"] == host
    ]
    assert service["spec"]["ports"][0]["port"] == int(port)


@pytest.mark.parametrize("name", VALUES)
def test_the_test_asks_every_process_for_its_spans(name: str) -> None:
    """By headless services, whose names have the addresses of all pods."""
    (test,) = [pod for pod in pods(name) if pod.command == "generate"]
    (flag,) = [arg for arg in test.container["args"] if str(arg).startswith("--expect-trace=")]
    asked = set()
    for address in str(flag).partition("=")[2].split(","):
        host, _, port = address.partition(":")
        service = named(rendered(name), "Service", host)
        assert service["spec"]["clusterIP"] == "None"
        for pod in [pod for pod in servers() if pod.where.startswith(f"{name}:")]:
            if service["spec"]["selector"].items() <= pod.labels.items():
                assert {"name": "metrics", "containerPort": int(port)} in pod.container["ports"]
                asked.add(pod.where)
    assert asked == {pod.where for pod in servers() if pod.where.startswith(f"{name}:")}


def program_text() -> str:
    """All code of the program."""
    return "".join(
        path.read_text()
        for package in ("diptych", "router", "prefill_worker", "decode_worker", "kvtransfer")
        for path in (ROOT / package).rglob("*.py")
    )


def test_metrics_in_alerts_and_scaling_are_made_somewhere() -> None:
    code = program_text()
    rules, asked = _rules(), _keda_queries()
    assert len(rules) >= 8
    assert len(asked) == 4
    for expr in (*(rule["expr"] for rule in rules), *asked):
        for name in re.findall(r"diptych_[a-z_]+", expr):
            stem = name.removeprefix("diptych_").removesuffix("_bucket").removesuffix("_sum")
            assert f'"{stem}"' in code, f"{expr}: {name}"


def _rules() -> list[dict[str, Any]]:
    (rules,) = [m for m in rendered("everything") if m["kind"] == "PrometheusRule"]
    (group,) = rules["spec"]["groups"]
    return list(group["rules"])


def _keda_queries() -> list[str]:
    (scaled,) = [m for m in rendered("everything") if m["kind"] == "ScaledObject"]
    triggers = scaled["spec"]["triggers"]
    return [t["metadata"]["query"] for t in triggers if t["type"] == "prometheus"]


def test_alerts_have_a_first_step_in_the_guide() -> None:
    guide = (ROOT / "docs" / "operations.md").read_text()
    for rule in _rules():
        assert f"`{rule['alert']}`" in guide


def test_log_lines_that_first_steps_name_are_written_somewhere() -> None:
    guide = (ROOT / "docs" / "operations.md").read_text()
    steps = [line for line in guide.splitlines() if re.match(r"\| `Diptych\w+` \|", line)]
    named_lines = re.findall(r'"([^"]+)"', "\n".join(steps))
    assert len(named_lines) >= 6
    code = program_text()
    assert [line for line in named_lines if f'"{line}' not in code] == []


def _keys(schema: dict[str, Any], prefix: str = "") -> set[str]:
    found: set[str] = set()
    for name, part in schema.get("properties", {}).items():
        found.add(prefix + name)
        found |= _keys(part, f"{prefix}{name}.")
    return found


def _fields(config: type[BaseModel], prefix: str = "") -> set[str]:
    found: set[str] = set()
    for name, field in config.model_fields.items():
        found.add(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= _fields(field.annotation, f"{prefix}{name}.")
    return found


@pytest.mark.parametrize("role", CONFIGS)
def test_settings_that_values_may_have_exist(role: str) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    pool_of = "decode" if role == "worker" else role
    keys = _keys(schema["definitions"][f"{pool_of}Settings"])
    assert len(keys) > 25
    if role == "decode":
        keys.remove("roles")  # which makes it a worker of both
    assert keys <= _fields(CONFIGS[role])


def test_the_version_of_the_chart_is_the_programs() -> None:
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == __version__
