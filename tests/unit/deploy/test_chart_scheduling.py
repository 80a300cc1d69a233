"""Where workers go, how many of them there are, and what devices they get."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from decode_worker.config import DecodeWorkerConfig
from diptych.worker.config import WorkerConfig
from prefill_worker.config import PrefillWorkerConfig
from router.config import RouterConfig
from tests.unit.deploy.chart import Pod, named, pods, rendered
from tests.unit.deploy.test_chart_and_program import config_of

GPU = "nvidia.com/gpu"
ON_GPUS = ("gpu", "nvlink", "rdma")
HARD, SOFT = (
    "requiredDuringSchedulingIgnoredDuringExecution",
    "preferredDuringSchedulingIgnoredDuringExecution",
)


def workers(name: str) -> list[Pod]:
    return [pod for pod in pods(name) if pod.command in ("prefill", "decode")]


def nearness(pod: Pod, kind: str) -> list[Mapping[str, Any]]:
    """What pods a pod is to be near, and of what label's value."""
    found = pod.spec.get("affinity", {}).get("podAffinity", {}).get(kind, [])
    return list(found)


@pytest.mark.parametrize("name", ON_GPUS)
def test_a_worker_on_a_gpu_takes_a_card_and_sizes_its_pool_by_it(name: str, tmp_path: Path) -> None:
    for pod in workers(name):
        config = config_of(pod, tmp_path)
        assert isinstance(config, WorkerConfig)
        assert config.device == "cuda"
        assert pod.container["resources"]["limits"][GPU] == 1
        assert config.kv_cache_memory is None, "or the pool would not be the rest of the card"
        assert config.num_blocks is None
        assert config.gpu_memory_utilization == 0.9
        cores = pod.container["resources"]["requests"]["cpu"]
        assert config.num_threads == int(cores), "or it would take all of the node's"
        assert {"key": GPU, "operator": "Exists", "effect": "NoSchedule"} in pod.spec["tolerations"]


def test_elsewhere_no_card_is_taken() -> None:
    others = [pod for name in ("default", "cpu", "everything") for pod in pods(name)]
    routers = [pod for name in ON_GPUS for pod in pods(name) if pod.command != "decode"]
    for pod in [*others, *(pod for pod in routers if pod.command != "prefill")]:
        assert GPU not in pod.container["resources"]["limits"]


def test_eight_cards_have_eight_workers() -> None:
    assert sum(pod.manifest["spec"]["replicas"] for pod in workers("nvlink")) == 8
    assert sum(pod.manifest["spec"]["replicas"] for pod in workers("gpu")) == 1


@pytest.mark.parametrize("name", ["default", "cpu", *ON_GPUS])
def test_routers_let_so_many_be_placed_that_all_places_are_used(name: str, tmp_path: Path) -> None:
    """And some more, whose prompts are computed meanwhile."""
    num_let, num_places = 0, 0
    for pod in pods(name):
        if pod.command in ("router", "decode"):
            config = config_of(pod, tmp_path)
            num_pods = pod.manifest["spec"]["replicas"]
            if isinstance(config, RouterConfig):
                num_let += num_pods * config.max_concurrent
            if isinstance(config, DecodeWorkerConfig):
                num_places += num_pods * config.max_num_seqs
    assert num_let > num_places > 0


def test_devices_of_a_network_are_named_where_they_are_asked_for(tmp_path: Path) -> None:
    for pod in workers("rdma"):
        config = config_of(pod, tmp_path)
        assert isinstance(config, PrefillWorkerConfig | DecodeWorkerConfig)
        assert config.transfer.transports == ("nixl", "inline")
        assert config.transfer.uses_rdma


def test_pods_on_one_machine_meet_on_their_own_interface(tmp_path: Path) -> None:
    """Not on lo, which each has for itself; and staged would read another's host memory."""
    for pod in workers("nvlink"):
        config = config_of(pod, tmp_path)
        assert isinstance(config, PrefillWorkerConfig | DecodeWorkerConfig)
        assert config.transfer.transports == ("nixl", "inline")
        assert config.transfer.ucx_net_devices == "eth0"


def test_workers_are_kept_near_each_other() -> None:
    for pod in workers("nvlink"):
        (term,) = nearness(pod, HARD)
        assert term["topologyKey"] == "kubernetes.io/hostname"
        assert "topologySpreadConstraints" not in pod.spec
    for pod in workers("rdma"):
        (weighted,) = nearness(pod, SOFT)
        assert weighted["podAffinityTerm"]["topologyKey"] == "topology.kubernetes.io/zone"
        assert nearness(pod, HARD) == []
    for name in ("default", "cpu"):
        assert not any("affinity" in pod.spec for pod in pods(name))


def test_a_worker_may_be_near_itself_so_that_the_first_finds_a_place() -> None:
    found = [(pod, term) for pod in workers("everything") for term in nearness(pod, HARD)]
    assert len(found) == len(workers("everything")) == 4
    for pod, term in found:
        selector = term["labelSelector"]
        assert selector["matchLabels"].items() <= pod.labels.items()
        assert selector["matchLabels"]["diptych/pool"] == pod.labels["diptych/pool"]
        (component,) = selector["matchExpressions"]
        assert component["operator"] == "In"
        assert set(component["values"]) == {"prefill", "decode"}
        assert pod.labels[component["key"]] == pod.command


def test_another_scheduler_is_asked_where_a_pool_names_one() -> None:
    named = {
        pod.labels["diptych/pool"]: pod.spec.get("schedulerName") for pod in workers("everything")
    }
    assert named == {"near": None, "far": None, "main": None, "large": "volcano"}


def test_what_a_pool_says_of_affinity_stays() -> None:
    (large,) = [pod for pod in workers("everything") if pod.labels["diptych/pool"] == "large"]
    assert large.spec["affinity"].keys() == {"nodeAffinity", "podAffinity"}


def test_keda_scales_by_what_waits_and_by_held_kv() -> None:
    scaled = named(rendered("everything"), "ScaledObject", "d-prefill-far")["spec"]
    target = named(rendered("everything"), "StatefulSet", scaled["scaleTargetRef"]["name"])
    assert "replicas" not in target["spec"], "or every upgrade would undo what KEDA did"
    assert (scaled["minReplicaCount"], scaled["maxReplicaCount"]) == (2, 6)
    waiting, held, running, asked, own = scaled["triggers"]
    assert waiting["metricType"] == "AverageValue"
    assert waiting["metadata"]["query"].startswith("sum(diptych_sequences_waiting{")
    assert held["metricType"] == "Value"
    assert held["metadata"]["threshold"] == "0.8"
    assert running["metadata"]["threshold"] == "51.2"
    assert asked["metadata"]["query"].startswith("sum(diptych_router_requests_waiting{")
    assert 'pod=~"d-router-[a-z0-9]+-[a-z0-9]+"' in asked["metadata"]["query"]
    assert own["type"] == "cpu"
    for trigger in (waiting, held, running, asked):
        assert trigger["metadata"]["serverAddress"] == "http://prometheus.monitoring:9090"
        assert trigger["metadata"]["ignoreNullValues"] == "false", "unknown is not 0"
        assert 'pod=~"d-prefill-far-[0-9]+"' in trigger["metadata"]["query"]
