"""Values that the chart has to refuse, each with the key that its refusal must name."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Wrong(NamedTuple):
    """Values, and the key that is wrong in them."""

    key: str
    values: Mapping[str, Any]


def _at(path: str, value: object) -> Wrong:
    """``value`` at a dotted path, whose last part is the key."""
    *above, key = path.split(".")
    values: dict[str, Any] = {key: value}
    for part in reversed(above):
        values = {part: values}
    return Wrong(key, values)


WRONG = (
    _at("hostNetwork", True),
    _at("image.tags", "1"),
    _at("image.pullPolicy", "Sometimes"),
    _at("image.digest", "sha256:1234"),
    _at("image.repository", ""),
    _at("model.path", "/models"),
    _at("model.source", ""),
    _at("model.cache.sizeLimit", "much"),
    _at("tracing.endpoint", "jaeger:4317"),
    _at("tracing.resourceAttributes.a", "b,c=d"),
    _at("metrics.enabled", "yes"),
    _at("tls.enable", True),
    _at("tls.domain", "Not a name"),
    _at("tls.secrets.operator", "a"),
    _at("router.publicTls.secret", "a"),
    _at("router.settings.api_keys", "/keys"),
    _at("metrics.podMonitor.intervall", "5s"),
    _at("networkPolicy.enable", True),
    _at("networkPolicy.clients", "all"),
    _at("router.replicas", "two"),
    _at("router.replicas", -1),
    _at("router.replicaCount", 2),
    _at("router.service.port", 0),
    _at("router.service.type", "ExternalName"),
    _at("router.service.externalTrafficPolicy", "local"),
    _at("podSecurity.runAsUser", 0),
    _at("podSecurity.runAsRoot", True),
    _at("router.httpRoute.paths", ["/v1"]),
    _at("router.httpRoute.timeouts.request", 0),
    _at("router.grpcRoute.timeouts", {"request": "0s"}),
    _at("router.preStopSeconds", 1.5),
    _at("router.settings.max_que", 3),
    _at("router.settings.max_concurrent", 0),
    _at("router.settings.prefill", ["10.0.0.1:1"]),
    _at("router.settings.timers.drain", 3),
    _at("router.probes.startup.failures", 3),
    _at("router.settings.discovery", "static"),
    _at("router.discovery", "static"),
    _at("router.http.port", 70000),
    _at("router.ingress.port", "https"),
    _at("router.rdma", {"enabled": True}),
    _at("prefill.settings.listen", "0.0.0.0:1"),
    _at("prefill.settings.transfer.transports", ["tcp"]),
    _at("prefill.settings.transfer.allow_faults", True),
    _at("prefill.shmSize", 64),
    _at("prefill.shmSize", "64K"),
    _at("tests.resources.claims", [{"name": "gpu"}]),
    _at("prefill.rdma.resource", "rdma/hca"),
    _at("decode.rdma.ipcLock", "no"),
    _at("prefill.resources.limit", {"cpu": "1"}),
    _at("prefill.pools.Large", {}),
    _at("prefill.pools.a-name-that-is-too-long", {}),
    _at("prefill.pools.main.replica", 2),
    _at("decode.pools.main.settings.block_size", 0),
    _at("decode.pools.main.pools", {}),
    _at("decode.settings.device", "tpu"),
    _at("decode.hostIPC", True),
    _at("decode.terminationGracePeriodSeconds", 0),
    _at("tests.image", "busybox"),
    _at("colocation.topology", "zone"),
    _at("keda.serverAddress", "prometheus:9090"),
    _at("decode.keda.kvUsage", 80),
    _at("router.keda.kvUsage", 0.8),
    _at("decode.keda.placeUsage", 1.5),
    _at("router.keda.waitingRequests", 8),
    _at("router", None),
    _at("decode", None),
    _at("model", None),
    _at("tls.certManager", None),
    _at("prefill.probes.startup", None),
    _at("router.autoscaling", None),
    _at("clusterDomain", None),
    _at("router.http.enabled", None),
)
