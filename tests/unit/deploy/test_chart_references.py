"""What one manifest of the chart names of another is there, and is what it is named for."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.unit.deploy.chart import (
    ROOT,
    VALUES,
    Manifest,
    Pod,
    all_pods,
    named,
    pods,
    rendered,
    servers,
)

SPREAD = ("default", "cpu", "rdma", "everything")
MODEL_LOAD_S = 1800  # of the largest models, fetched first


def kinds(name: str, kind: str) -> list[Manifest]:
    return [manifest for manifest in rendered(name) if manifest["kind"] == kind]


def groups(name: str) -> list[Pod]:
    """A pod of each group that serves."""
    return [pod for pod in pods(name) if pod.command != "generate"]


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each value that holds no others, with the keys on the way to it."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from leaves(part, (*path, str(key)))
    elif isinstance(value, list):
        for part in value:
            yield from leaves(part, path)
    else:
        yield path, value


def found(name: str, selector: Mapping[str, Any]) -> list[str]:
    """The groups whose pods have all the labels."""
    labels = selector["matchLabels"]
    assert labels
    return [pod.where for pod in groups(name) if labels.items() <= pod.labels.items()]


def router(name: str) -> Pod:
    (pod,) = [pod for pod in pods(name) if pod.command == "router"]
    return pod


def test_names_that_look_like_numbers_are_texts() -> None:
    """Kubernetes takes no others."""
    numbers = {"123", "456", "0123", "1e3", "on", "null", *map(str, range(1, 16))}
    names = re.compile(r"name|namespace|key|.+(Name|Class)")
    seen = set()
    for path, value in leaves(list(rendered("numbers"))):
        if names.fullmatch(path[-1]) or {"labels", "matchLabels", "selector"} & {*path}:
            assert isinstance(value, str), path
            seen.add(value)
    assert numbers <= seen


@pytest.mark.parametrize("name", VALUES)
def test_each_group_has_a_disruption_budget_of_its_own(name: str) -> None:
    budgets = [budget["spec"] for budget in kinds(name, "PodDisruptionBudget")]
    assert [found(name, budget["selector"]) for budget in budgets] == [
        [pod.where] for pod in groups(name)
    ]
    assert all(budget["maxUnavailable"] == 1 for budget in budgets)


@pytest.mark.parametrize("name", VALUES)
def test_each_group_spreads_its_own_pods(name: str) -> None:
    for pod in groups(name):
        for constraint in pod.spec.get("topologySpreadConstraints", ()):
            assert found(name, constraint["labelSelector"]) == [pod.where]
    if name in SPREAD:
        assert all(pod.spec["topologySpreadConstraints"] for pod in groups(name))


def test_scalers_find_what_they_scale() -> None:
    name = "everything"
    scalers = [*kinds(name, "HorizontalPodAutoscaler"), *kinds(name, "ScaledObject")]
    scaled = []
    for scaler in scalers:
        target = scaler["spec"]["scaleTargetRef"]
        manifest = named(rendered(name), target["kind"], target["name"])
        assert manifest["apiVersion"] == target["apiVersion"]
        assert "replicas" not in manifest["spec"], "or every upgrade would undo its work"
        scaled.append(target["name"])
    assert sorted(scaled) == ["d-decode-main", "d-prefill-far", "d-router"]


def test_all_processes_are_scraped_where_they_tell_metrics() -> None:
    (monitor,) = kinds("everything", "PodMonitor")
    spec = monitor["spec"]
    assert found("everything", spec["selector"]) == [pod.where for pod in groups("everything")]
    (endpoint,) = spec["podMetricsEndpoints"]
    for pod in groups("everything"):
        assert {"name": endpoint["port"], "containerPort": 9100} in pod.container["ports"]


def test_alerts_are_of_the_pods_that_serve() -> None:
    """As their controllers name them; another release's, in the same namespace, have others."""
    ends = {"Deployment": "5d7f9c4b8-x2z4q", "StatefulSet": "0"}
    own = [pod.manifest for pod in groups("everything")]
    names = [f"{each['metadata']['name']}-{ends[each['kind']]}" for each in own]
    (made,) = kinds("everything", "PrometheusRule")
    for rule in made["spec"]["groups"][0]["rules"]:
        (pattern,) = set(re.findall(r' pod=~"([^"]+)"', rule["expr"]))
        assert all(re.fullmatch(pattern, name) for name in names), rule["expr"]
        assert not any(re.fullmatch(pattern, f"other-{name}") for name in names)


@pytest.mark.parametrize("name", VALUES)
def test_services_lead_to_ports_of_their_pods(name: str) -> None:
    for service in kinds(name, "Service"):
        (where,) = found(name, {"matchLabels": service["spec"]["selector"]})
        (pod,) = [pod for pod in groups(name) if pod.where == where]
        names = {port["name"] for port in pod.container["ports"]}
        for port in service["spec"]["ports"]:
            assert port["targetPort"] == port["name"]
            assert port["name"] in names


@pytest.mark.parametrize("name", VALUES)
def test_ports_are_called_what_gateways_and_meshes_know(name: str) -> None:
    """Traefik refuses a GRPCRoute to a port called grpc; Istio reads none of TLS called so."""
    for service in kinds(name, "Service"):
        (where,) = found(name, {"matchLabels": service["spec"]["selector"]})
        (pod,) = [pod for pod in groups(name) if pod.where == where]
        own = "--public-tls." if pod.command == "router" else "--tls."
        speaks_tls = any(arg.startswith(own) for arg in pod.container["args"])
        (protocol,) = [
            port["appProtocol"] for port in service["spec"]["ports"] if port["name"] == "grpc"
        ]
        assert protocol == ("https" if speaks_tls else "kubernetes.io/h2c")


def test_routes_lead_to_the_routers_service() -> None:
    name = "everything"
    service = named(rendered(name), "Service", router(name).manifest["metadata"]["name"])
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    (ingress,), (route,) = kinds(name, "Ingress"), kinds(name, "GRPCRoute")
    (rule,) = ingress["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    assert path["backend"]["service"] == {
        "name": service["metadata"]["name"],
        "port": {"name": "grpc"},
    }
    assert service["spec"]["externalTrafficPolicy"] == "Local"
    assert service["spec"]["loadBalancerClass"] == "example.com/internal"
    (rule,) = route["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": service["metadata"]["name"], "port": ports["grpc"]}]


@pytest.mark.parametrize("pod", servers(), ids=lambda pod: pod.where)
def test_the_start_may_last_as_long_as_a_model_takes(pod: Pod) -> None:
    startup, liveness = (pod.container[f"{each}Probe"] for each in ("startup", "liveness"))
    assert startup["periodSeconds"] * startup["failureThreshold"] >= MODEL_LOAD_S
    assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 30


@pytest.mark.parametrize("name", VALUES)
def test_no_rollout_is_given_up_while_a_model_loads(name: str) -> None:
    """Kubernetes says so after ten minutes, and ``helm --wait`` believes it."""
    deployment = router(name).manifest
    startup = router(name).container["startupProbe"]
    deadline_s = deployment["spec"]["progressDeadlineSeconds"]
    assert deadline_s >= max(MODEL_LOAD_S, startup["periodSeconds"] * startup["failureThreshold"])


@pytest.mark.parametrize("pod", all_pods(), ids=lambda pod: pod.where)
def test_mounts_are_of_volumes_that_are_there(pod: Pod) -> None:
    volumes = {volume["name"]: volume for volume in pod.spec.get("volumes", ())}
    mounts = {mount["mountPath"]: mount for mount in pod.container.get("volumeMounts", ())}
    assert {mount["name"] for mount in mounts.values()} == volumes.keys()
    is_worker = pod.command in ("prefill", "decode", "worker")
    assert ("/dev/shm" in mounts) is is_worker
    if is_worker:
        memory = volumes[mounts["/dev/shm"]["name"]]["emptyDir"]
        assert memory["medium"] == "Memory"
        assert memory["sizeLimit"]
    if "/model" in mounts:
        assert mounts["/model"]["readOnly"] is True


@pytest.mark.parametrize("name", VALUES)
def test_routers_wait_for_balancers_and_workers_need_not(name: str) -> None:
    for pod in groups(name):
        assert ("lifecycle" in pod.container) is (pod.command == "router")


def test_spans_are_sent_where_the_values_say() -> None:
    for name in VALUES:
        for pod in groups(name):
            sent = [arg for arg in pod.container["args"] if arg.startswith("--otlp-endpoint")]
            expected = ["--otlp-endpoint=http://jaeger:4317"] if name == "everything" else []
            assert sent == expected


def test_a_node_can_be_emptied_as_the_guide_says() -> None:
    """kubectl refuses pods with volumes of their own, of which all have some, unless told."""
    volumes = [volume for pod in servers() for volume in pod.spec["volumes"]]
    assert any("emptyDir" in volume for volume in volumes)
    guide = (ROOT / "docs" / "operations.md").read_text()
    (command,) = re.findall(r"`(kubectl drain [^`]+)`", guide)
    assert "--delete-emptydir-data" in command
    assert "--ignore-daemonsets" in command
