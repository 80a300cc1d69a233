"""What values say stands in the manifests; what they leave unsaid is as the chart has it."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.helm import HELM_4, template
from tests.unit.deploy.chart import Manifest, Pod, named, parsed, pods_of


@pytest.fixture
def made(tmp_path: Path) -> Any:
    """The manifests that helm makes with these values."""

    def make(**values: object) -> tuple[Manifest, ...]:
        path = tmp_path / "values.yaml"
        path.write_text(json.dumps(values))
        return parsed(template(HELM_4, [path]))

    return make


def pod(manifests: tuple[Manifest, ...], command: str) -> Pod:
    """The only one that runs this command."""
    (found,) = [each for each in pods_of(manifests, "here") if each.command == command]
    return found


def http_rule(manifests: tuple[Manifest, ...]) -> dict[str, Any]:
    """The one rule of the HTTPRoute."""
    (route,) = [m for m in manifests if m["kind"] == "HTTPRoute"]
    (rule,) = route["spec"]["rules"]
    return dict(rule)


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, {"request": "0s", "backendRequest": "0s"}),
        ({"timeouts": {"request": "1h"}}, {"request": "1h", "backendRequest": "0s"}),
        ({"timeouts": {"backendRequest": None}}, {"request": "0s"}),
        ({"timeouts": None}, None),
    ],
)
def test_no_gateway_ends_an_answer_unless_told_to(made: Any, own: Any, expected: Any) -> None:
    """Envoy would after 15 s, where the route says nothing."""
    route = {"enabled": True, "parentRefs": [{"name": "gateway"}], **own}
    assert http_rule(made(router={"httpRoute": route})).get("timeouts") == expected


@pytest.mark.parametrize(
    ("settings", "drain_s", "grace_s"),
    [
        ({}, 600, 651),
        ({"max_queue": 3, "timers": {"lame_duck_s": 2}}, 600, 654),
        ({"timers": {"drain_s": 30}}, 30, 81),
        ({"timers": {"drain_s": None}}, None, 71),  # the program's own 20 s
        ({"timers": None}, None, 71),
        (None, None, 71),
    ],
)
def test_a_router_that_ends_lets_long_answers_end(
    made: Any, settings: Any, drain_s: float | None, grace_s: int
) -> None:
    """A worker's sequences move to others; an answer ends with its router."""
    manifests = made(router={"settings": settings}, metrics={"alerts": {"enabled": True}})
    router = pod(manifests, "router")
    assert router.spec["terminationGracePeriodSeconds"] == grace_s
    config = named(manifests, "ConfigMap", router.manifest["metadata"]["name"])
    timers = json.loads(config["data"]["settings.yaml"]).get("timers", {})
    assert timers.get("drain_s") == drain_s
    assert pod(manifests, "decode").spec["terminationGracePeriodSeconds"] == 31


def test_a_spread_of_its_own_pods_is_the_values_own(made: Any) -> None:
    """Of all workers together, say; one that names no pods is of those of its group."""
    spread = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    own = {**spread, "labelSelector": {"matchExpressions": [{"key": "a", "operator": "Exists"}]}}
    of_all = {**spread, "labelSelector": {}}
    manifests = made(decode={"topologySpreadConstraints": [own, of_all, spread]})
    decode = pod(manifests, "decode")
    assert decode.spec["topologySpreadConstraints"] == [
        own,
        of_all,
        {**spread, "labelSelector": decode.manifest["spec"]["selector"]},
    ]


def variables(found: Pod) -> dict[str, str | None]:
    """Of a pod, in their order: one may name those before it. None is named twice."""
    listed = [(each["name"], each.get("value")) for each in found.container["env"]]
    assert len(listed) == len(dict(listed)), "server-side apply would refuse it"
    return dict(listed)


def test_a_variable_of_the_values_own_takes_the_charts_place(made: Any) -> None:
    own = {"HF_HOME": "/model/hub", "POD_NAME": "a", "OTEL_RESOURCE_ATTRIBUTES": "b=c"}
    extra = [{"name": name, "value": value} for name, value in own.items()]
    manifests = made(router={"extraEnv": extra}, decode={"extraEnv": extra[:2]})
    assert own.items() <= variables(pod(manifests, "router")).items()
    names = list(variables(pod(manifests, "decode")))
    assert names.index("POD_NAME") < names.index("OTEL_RESOURCE_ATTRIBUTES")
    assert variables(pod(manifests, "prefill"))["HF_HOME"] == "/cache/huggingface"


def test_spans_say_what_the_values_say_beside_where_the_pod_is(made: Any) -> None:
    manifests = made(tracing={"resourceAttributes": {"service.namespace": "llm", "a": "b%20c"}})
    where = "k8s.namespace.name=serving,k8s.pod.name=$(POD_NAME),k8s.node.name=$(NODE_NAME)"
    for command in ("router", "prefill", "decode"):
        said = variables(pod(manifests, command))["OTEL_RESOURCE_ATTRIBUTES"]
        assert said == f"{where},a=b%20c,service.namespace=llm"


def test_null_takes_a_pool_away_whoever_named_it(made: Any) -> None:
    """As a second file of values says it; the chart's own is helm's to leave out."""
    pools = {"main": None, "large": None, "small": {"keda": {"enabled": True}}}
    manifests = made(
        decode={"pools": pools},
        prefill={"pools": {"main": None, "large": None}},
        keda={"serverAddress": "http://prometheus:9090"},
        metrics={"alerts": {"enabled": True}},
        router={"discovery": "kubernetes"},
    )
    assert "-large" not in json.dumps(manifests)
    router = pod(manifests, "router")
    config = named(manifests, "ConfigMap", router.manifest["metadata"]["name"])
    found = json.loads(config["data"]["settings.yaml"])["kubernetes"]
    assert found == {"prefill": [], "decode": ["try-diptych-decode-small"]}
    assert "--expect-handoff" not in pod(manifests, "generate").container["args"]
    (scaled,) = [m for m in manifests if m["kind"] == "ScaledObject"]
    assert len(scaled["spec"]["triggers"]) == 4, "who computes prompts is this pool"


@pytest.mark.parametrize("name", ["Meta: Llama 3.1", "llama #1", '7\'b \\ "q"'])
def test_a_model_is_called_what_the_values_call_it(made: Any, name: str) -> None:
    """Whatever YAML would make of it."""
    manifests = made(model={"servedName": name, "source": f"/model/{name}"})
    assert f"--served-model-name={name}" in pod(manifests, "router").container["args"]
    for command in ("router", "prefill", "decode"):
        assert f"--model=/model/{name}" in pod(manifests, command).container["args"]


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({"type": "Recreate"}, {"type": "Recreate"}),
        (
            {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
            {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
        ),
    ],
)
def test_routers_may_be_replaced_all_at_once(made: Any, own: Any, expected: Any) -> None:
    """Kubernetes refuses a rollingUpdate beside Recreate."""
    strategy = pod(made(router={"strategy": own}), "router").manifest["spec"]["strategy"]
    assert strategy == expected


def on_cards(number: int) -> dict[str, Any]:
    """Values of a pool whose workers have so many."""
    return {"resources": {"limits": {"nvidia.com/gpu": number}}}


@pytest.mark.parametrize(
    ("values", "size"),
    [
        ({}, "64Mi"),
        ({"settings": {"device": "cuda"}, **on_cards(1)}, "64Mi"),
        ({"settings": {"tensor_parallel": 2}}, "64Mi"),
        ({"settings": {"device": "cuda", "tensor_parallel": 2}, **on_cards(2)}, "1Gi"),
        ({"settings": {"device": "auto", "tensor_parallel": 2}, **on_cards(2)}, "1Gi"),
        (
            {
                "settings": {"device": "cuda", "tensor_parallel": 2},
                "shmSize": "4Gi",
                **on_cards(2),
            },
            "4Gi",
        ),
        ({"shmSize": None}, "64Mi"),
    ],
)
def test_ranks_on_gpus_have_room_for_what_they_tell_each_other(
    made: Any, values: Any, size: str
) -> None:
    volumes = pod(made(decode=values), "decode").spec["volumes"]
    assert [v["emptyDir"]["sizeLimit"] for v in volumes if v["name"] == "shm"] == [size]


@pytest.mark.parametrize("name", ["nvidia.com/gpu", "nvidia.com/mig-1g.10gb"])
def test_a_gpu_is_a_card_or_a_part_of_one(made: Any, name: str) -> None:
    pool = {"settings": {"device": "cuda"}, "resources": {"limits": {name: "1"}}}
    assert pod(made(decode=pool), "decode").container["resources"]["limits"][name] == "1"


def test_a_gpu_may_be_claimed(made: Any) -> None:
    pool = {
        "settings": {"device": "cuda"},
        "resources": {"claims": [{"name": "gpu"}]},
        "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}],
    }
    claims = pod(made(decode=pool), "decode").container["resources"]["claims"]
    assert claims == [{"name": "gpu"}]


@pytest.mark.parametrize("transport", ["nixl", "ucxx", "staged"])
def test_rdma_without_a_capability_that_a_cluster_refuses(made: Any, transport: str) -> None:
    """As Pod Security's restricted does; one pool says so, and the other has it."""
    transfer = {"transports": [transport, "inline"], "ucx_net_devices": "mlx5_0:1"}
    settings = {"transfer": transfer}
    near = {"settings": settings, "rdma": {"enabled": True}}
    without = {**near, "pools": {"main": {"rdma": {"ipcLock": False}}}}
    manifests = made(prefill=near, decode=without)
    drops = {"drop": ["ALL"]}
    for command, expected in (("prefill", {**drops, "add": ["IPC_LOCK"]}), ("decode", drops)):
        container = pod(manifests, command).container
        assert container["securityContext"]["capabilities"] == expected
        assert container["resources"]["limits"]["rdma/hca"] == 1


def test_the_tests_pod_goes_where_the_values_say(made: Any) -> None:
    where = {
        "tolerations": [{"key": "nodes", "operator": "Exists"}],
        "nodeSelector": {"pool": "llm"},
        "affinity": {"nodeAffinity": {}},
    }
    assert where.items() <= pod(made(tests=where), "generate").spec.items()
    assert not where.keys() & pod(made(), "generate").spec.keys()


@pytest.mark.parametrize(
    ("settings", "is_looked_for"),
    [
        ({"trace_sample_ratio": 0.01}, True),
        ({"trace_caller_per_s": 0}, True),
        ({"trace_caller_per_s": 0, "trace_sample_ratio": 0.01}, False),
    ],
)
def test_no_trace_is_looked_for_that_only_chance_would_send(
    made: Any, settings: Any, is_looked_for: bool
) -> None:
    """A client asks in vain there, as the test of the release does."""
    args = pod(made(router={"settings": settings}), "generate").container["args"]
    assert any(str(arg).startswith("--expect-trace=") for arg in args) is is_looked_for


def test_an_amount_may_be_a_number(made: Any) -> None:
    """Half a core, as people write it."""
    amounts = {"requests": {"cpu": 0.5}, "limits": {"cpu": 2}}
    manifests = made(decode={"resources": amounts}, tests={"resources": amounts})
    for command in ("decode", "generate"):
        found = pod(manifests, command).container["resources"]
        assert (found["requests"]["cpu"], found["limits"]["cpu"]) == (0.5, 2)


def test_null_takes_an_amount_away_whoever_gave_it(made: Any) -> None:
    """As a second file of values says it, or a pool of what all have; Kubernetes takes it for 0."""
    pools = {"main": {"resources": {"limits": {"memory": None}}}}
    limits = {"limits": {"cpu": None}}
    manifests = made(
        router={"resources": limits},
        prefill={"resources": {"limits": {"cpu": 2}}, "pools": pools},
        decode={"resources": None},
        tests={"resources": limits},
    )
    left = {
        command: pod(manifests, command).container["resources"].get("limits")
        for command in ("router", "prefill", "decode", "generate")
    }
    assert left == {
        "router": {"memory": "2Gi"},
        "prefill": {"cpu": 2},
        "decode": None,
        "generate": {"memory": "512Mi"},
    }


def test_null_leaves_workers_the_programs_own_settings(made: Any) -> None:
    """As it does the router."""
    decode = pod(made(decode={"settings": None, "affinity": None}), "decode")
    assert decode.spec["terminationGracePeriodSeconds"] == 31


@pytest.mark.parametrize(
    ("variable", "is_open"),
    [
        ({"name": "TRANSFER__TRANSPORTS", "value": '["nixl", "inline"]'}, True),
        ({"name": "TRANSFER", "value": '{"transports": ["ucxx"]}'}, True),
        ({"name": "TRANSFER__TRANSPORTS", "valueFrom": {"configMapKeyRef": {}}}, True),
        ({"name": "TRANSFER__TRANSPORTS", "value": '["inline"]'}, False),
        ({"name": "TRANSFER__UCX_NET_DEVICES", "value": "nixl0"}, False),
    ],
)
def test_transports_that_a_variable_names_reach_their_peers(
    made: Any, variable: Any, is_open: bool
) -> None:
    """They listen on ports that the system picks; the chart's own settings say inline."""
    extra = [{**variable, "name": f"DIPTYCH_PREFILL_{variable['name']}"}]
    policy = named(made(prefill={"extraEnv": extra}), "NetworkPolicy", "try-diptych-prefill")
    rules = [rule for rule in policy["spec"]["ingress"] if "ports" not in rule]
    assert bool(rules) is is_open
