"""What a pod of the chart may do, and who may reach it."""

from collections.abc import Mapping
from typing import Any

import pytest

from tests.unit.deploy.chart import RELEASE, VALUES, Pod, all_pods, pods, rendered, servers

SEEN = all_pods()
# Renderings whose routers watch EndpointSlices.
WATCHING = {"everything", "cpu", "rdma"}
# Those whose workers move KV by transports that have ports of their own.
OTHER_TRANSPORTS = {"everything", "nvlink", "rdma"}


@pytest.mark.parametrize("pod", SEEN, ids=lambda pod: pod.where)
def test_a_pod_has_no_rights(pod: Pod) -> None:
    spec, container = pod.spec, pod.container
    assert spec["enableServiceLinks"] is False
    name = pod.where.partition(":")[0]
    asks_api = pod.command == "router" and name in WATCHING  # for its workers' endpoints
    assert spec["automountServiceAccountToken"] is asks_api
    assert not {"hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"} & set(spec)
    assert spec["securityContext"]["runAsNonRoot"] is True
    ids = [spec["securityContext"][key] for key in ("runAsUser", "runAsGroup", "fsGroup")]
    assert ids == ([20001, 20002, 20003] if name == "everything" else [10001] * 3)
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    security = container["securityContext"]
    assert security["allowPrivilegeEscalation"] is False
    assert not security.get("privileged")
    assert security["readOnlyRootFilesystem"] is True
    assert security["capabilities"]["drop"] == ["ALL"]
    assert not any("hostPath" in volume for volume in spec.get("volumes", []))
    secrets = [volume["secret"] for volume in spec.get("volumes", []) if "secret" in volume]
    assert all(secret["defaultMode"] == 0o440 for secret in secrets)


@pytest.mark.parametrize("pod", SEEN, ids=lambda pod: pod.where)
def test_a_pod_writes_to_what_is_its_own_alone(pod: Pod) -> None:
    """Not to a model, which all of a pool read."""
    mounts = pod.container.get("volumeMounts", [])
    written = {mount["mountPath"] for mount in mounts if not mount.get("readOnly")}
    assert written <= {"/cache", "/tmp", "/dev/shm", "/extra"}


@pytest.mark.parametrize("pod", SEEN, ids=lambda pod: pod.where)
def test_memory_is_locked_only_where_a_device_reads_it(pod: Pod) -> None:
    is_worker = pod.command in ("prefill", "decode")
    by_values = pod.where.startswith("rdma:") and is_worker
    wants_rdma = by_values or pod.labels.get("diptych/pool") == "near"
    resources = {"rdma/hca" if by_values else "rdma/hca_shared"} if wants_rdma else set()
    added = pod.container["securityContext"]["capabilities"].get("add", [])
    assert added == (["IPC_LOCK"] if wants_rdma else [])
    limits = pod.container["resources"]["limits"]
    assert {key for key in limits if key.startswith("rdma/")} == resources


@pytest.mark.parametrize("pod", SEEN, ids=lambda pod: pod.where)
def test_every_pod_says_what_memory_it_needs(pod: Pod) -> None:
    resources = pod.container["resources"]
    assert resources["requests"].keys() >= {"cpu", "memory"}
    assert "memory" in resources["limits"]


def selects(selector: Mapping[str, Any], pod: Pod) -> bool:
    """Whether the labels that a selector asks for are the pod's."""
    wanted = selector.get("matchLabels", {})
    return all(pod.labels.get(key) == value for key, value in wanted.items())


def reaches(name: str, source: Pod, target: Pod, port: int | str) -> bool:
    """Whether the policies of a rendering let ``source`` connect to a port of ``target``."""
    ports = {p["containerPort"]: p["name"] for p in target.container.get("ports", [])}
    policies = [
        m["spec"]
        for m in rendered(name)
        if m["kind"] == "NetworkPolicy" and selects(m["spec"]["podSelector"], target)
    ]
    assert policies, f"nothing guards {target.where}"
    for rule in [rule for policy in policies for rule in policy["ingress"]]:
        allowed = {p["port"] for p in rule["ports"]} if "ports" in rule else {port}
        if not {port, ports.get(port)} & allowed:
            continue
        for peer in rule["from"]:
            if "namespaceSelector" not in peer and selects(peer["podSelector"], source):
                return True
    return False


@pytest.mark.parametrize("name", VALUES)
def test_only_routers_reach_workers_and_only_decode_workers_their_sources(name: str) -> None:
    by_role: dict[str, Pod] = {pod.command: pod for pod in pods(name)}
    ports = {"router": 50051, "prefill": 50061, "decode": 50061, "worker": 50061}
    allowed = {
        (source.command, target.command)
        for source in by_role.values()
        for target in by_role.values()
        if target.command in ports and reaches(name, source, target, ports[target.command])
    }
    pairs = {
        ("router", "prefill"), ("router", "decode"), ("decode", "prefill"), ("generate", "router"),
    }  # fmt: skip
    if name in OTHER_TRANSPORTS:
        pairs |= {("prefill", "decode")}
    if "worker" in by_role:  # of both roles, in a pool of decode, whose policy is all its pools'
        pairs |= {("router", "worker"), *((each, "prefill") for each in ("decode", "worker"))}
        both = ("decode", "worker")
        pairs |= {(source, target) for source in both for target in both}
        if name in OTHER_TRANSPORTS:
            pairs |= {("prefill", "worker")}
    if name != "everything":  # where clients are named; else every pod of the namespace is one
        pairs |= {(source, "router") for source in by_role}
    assert allowed == {(source, target) for source, target in pairs if target in by_role}
    if "prefill" in by_role:
        through = reaches(name, by_role["decode"], by_role["prefill"], 40000)
        assert through is (name in OTHER_TRANSPORTS)
    assert not reaches(name, by_role["router"], by_role["generate"], 50051)


@pytest.mark.parametrize("name", VALUES)
def test_the_test_reads_metrics_of_all_whoever_else_may(name: str) -> None:
    (test,) = [pod for pod in pods(name) if pod.command == "generate"]
    (router,) = [pod for pod in pods(name) if pod.command == "router"]
    for target in [pod for pod in servers() if pod.where.startswith(f"{name}:")]:
        assert reaches(name, test, target, 9100)
        assert reaches(name, router, target, 9100) is (name != "everything")


@pytest.mark.parametrize("name", VALUES)
def test_who_is_let_in_by_its_labels_is_of_this_release(name: str) -> None:
    """Or any pod of the namespace, where nobody is named."""
    policies = [m["spec"] for m in rendered(name) if m["kind"] == "NetworkPolicy"]
    peers = [
        peer["podSelector"]["matchLabels"]
        for policy in policies
        for rule in policy["ingress"]
        for peer in rule["from"]
        if "namespaceSelector" not in peer and peer["podSelector"]
    ]
    assert peers
    for labels in peers:
        assert labels["app.kubernetes.io/name"] == "diptych"
        assert labels["app.kubernetes.io/instance"] == RELEASE
        assert "app.kubernetes.io/component" in labels


def test_a_token_reads_endpoints_and_nothing_else() -> None:
    for name in VALUES:
        kinds = {m["kind"] for m in rendered(name)}
        assert ("Role" in kinds) is (name in WATCHING)
        assert "ClusterRole" not in kinds
    manifests = rendered("everything")
    (role,) = [m for m in manifests if m["kind"] == "Role"]
    assert role["rules"] == [
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["get", "list", "watch"],
        }
    ]
    (binding,) = [m for m in manifests if m["kind"] == "RoleBinding"]
    (router,) = [pod for pod in pods("everything") if pod.command == "router"]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert [subject["name"] for subject in binding["subjects"]] == [
        router.spec["serviceAccountName"]
    ]
