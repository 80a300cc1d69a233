"""Makes the chart's values.schema.json: strict everywhere, settings as the program has them.

``make manifests`` writes it. Draft 7, which helm 3 and helm 4 both understand. What
Kubernetes takes as it is (tolerations, affinity, …) is left to Kubernetes to check.
"""

from collections.abc import Mapping
from typing import TypeAlias, TypeGuard

from pydantic import BaseModel

from prefill_worker.config import PrefillWorkerConfig
from router.config import RouterConfig
from soft_worker.config import SoftWorkerConfig

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

ROLES: Mapping[str, type[BaseModel]] = {
    "router": RouterConfig,
    "prefill": PrefillWorkerConfig,
    "decode": SoftWorkerConfig,  # a pool whose settings name `roles` runs `diptych worker`
}
# Set by the chart itself, or never for service.
_NOT_OFFERED = {
    *("config", "listen", "metrics_port", "port_file", "otlp_endpoint", "stop_with_stdin"),
    *("model", "served_model_name", "cache_dir", "prefill", "decode"),
    *("discovery", "file", "kubernetes", "http", "http_port", "http_metrics"),
    *("tls", "public_tls", "api_keys", "health_port", "processes", "shares_ports", "beats_to"),
    *("allow_faults", "faults", "allow_nixl_tcp"),
}
_CONSTRAINTS = (
    *("type", "enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    *("minLength", "minItems"),
)

TEXT: Json = {"type": "string"}
SOME_TEXT: Json = {"type": "string", "minLength": 1}
FLAG: Json = {"type": "boolean"}
COUNT: Json = {"type": "integer", "minimum": 0}
POSITIVE: Json = {"type": "integer", "minimum": 1}
TEXTS: Json = {"type": "object", "additionalProperties": TEXT}
ATTRIBUTES: Json = {
    "type": "object",
    "propertyNames": {"pattern": "^[^,= ]+$"},
    "additionalProperties": {"type": "string", "pattern": "^[^,]*$"},
}
ANY_MAP: Json = {"type": "object"}
ANY_LIST: Json = {"type": "array", "items": {"type": "object"}}
PULL_POLICY: Json = {"enum": ["Always", "IfNotPresent", "Never"]}
QUANTITY: Json = {"type": "string", "pattern": "^[0-9]+(\\.[0-9]+)?(k|[MGT]|[KMGT]i)?$"}
QUANTITY_OR_NONE: Json = {"type": "string", "pattern": "^([0-9]+(\\.[0-9]+)?(k|[MGT]|[KMGT]i)?)?$"}
SECONDS_OR_NONE: Json = {"type": ["integer", "null"], "minimum": 1}
DURATION_OR_NONE: Json = {
    "type": ["string", "null"],
    "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$",
}
ID_OR_NONE: Json = {"type": ["integer", "null"], "minimum": 1}
PORT: Json = {"type": "integer", "minimum": 1, "maximum": 65535}
POOL_NAME = "^[a-z]([a-z0-9-]{0,12}[a-z0-9])?$"
# Sections that the chart does without where they are null.
_DISPENSABLE = {"colocation", "resources", "ingress", "grpcRoute", "httpRoute"}


def closed(properties: Mapping[str, Json], required: tuple[str, ...] = ()) -> dict[str, Json]:
    """An object of these keys and no others."""
    made: dict[str, Json] = {
        "type": "object",
        "additionalProperties": False,
        "properties": dict(properties),
    }
    return {**made, "required": list(required)} if required else made


def filled(section: Mapping[str, Json]) -> dict[str, Json]:
    """The same where helm has put the defaults in: null alone takes any of them out again."""
    properties = section["properties"]
    assert isinstance(properties, dict)
    parts = {name: filled(part) if _is_section(part) else part for name, part in properties.items()}
    required: list[Json] = [
        name
        for name, part in parts.items()
        if part in (FLAG, SOME_TEXT) or (_is_section(part) and name not in _DISPENSABLE)
    ]
    return {**section, "properties": parts, **({"required": required} if required else {})}


def _is_section(schema: Json) -> TypeGuard[dict[str, Json]]:
    return isinstance(schema, dict) and schema.get("type") == "object" and "properties" in schema


def values_schema() -> dict[str, Json]:
    """The whole schema."""
    top = closed(
        {
            "nameOverride": TEXT,
            "fullnameOverride": TEXT,
            "clusterDomain": SOME_TEXT,
            "global": ANY_MAP,  # helm's own, for charts that contain this one
            "image": closed(
                {
                    "repository": SOME_TEXT,
                    "tag": TEXT,
                    "digest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
                    "pullPolicy": PULL_POLICY,
                }
            ),
            "imagePullSecrets": ANY_LIST,
            "serviceAccount": closed({"create": FLAG, "name": TEXT, "annotations": TEXTS}),
            "podSecurity": closed(
                dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), ID_OR_NONE)
            ),
            "model": _model(),
            "colocation": closed({"topologyKey": TEXT, "required": FLAG, "byPool": FLAG}),
            "keda": closed(
                {
                    "serverAddress": {"type": "string", "pattern": "^(https?://.+)?$"},
                    "pollingInterval": POSITIVE,
                    "stabilizationSeconds": COUNT,
                }
            ),
            "tracing": closed(
                {
                    "endpoint": {"type": "string", "pattern": "^(https?://.+)?$"},
                    "resourceAttributes": ATTRIBUTES,
                }
            ),
            "metrics": closed(
                {
                    "enabled": FLAG,
                    "podMonitor": closed({"enabled": FLAG, "labels": TEXTS, "interval": SOME_TEXT}),
                    "alerts": closed({"enabled": FLAG, "labels": TEXTS}),
                    "dashboard": closed({"enabled": FLAG, "labels": TEXTS}),
                }
            ),
            "tls": closed(
                {
                    "enabled": FLAG,
                    "domain": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"},
                    "secrets": closed(dict.fromkeys(ROLES, TEXT)),
                    "certManager": closed(
                        {
                            "enabled": FLAG,
                            "issuerRef": closed(
                                {"name": TEXT, "kind": SOME_TEXT, "group": SOME_TEXT}
                            ),
                            "duration": SOME_TEXT,
                            "renewBefore": SOME_TEXT,
                        }
                    ),
                }
            ),
            "networkPolicy": closed({"enabled": FLAG, "clients": ANY_LIST, "metrics": ANY_LIST}),
            "router": _router(),
            "prefill": _workers("prefill"),
            "decode": _workers("decode"),
            "tests": closed(
                {
                    "enabled": FLAG,
                    "resources": _resources(),
                    "apiKey": closed({"secretName": TEXT, "key": SOME_TEXT}),
                    "nodeSelector": TEXTS,
                    "tolerations": ANY_LIST,
                    "affinity": ANY_MAP,
                }
            ),
        }
    )
    definitions: dict[str, Json] = {
        f"{role}Settings": _settings(config) for role, config in ROLES.items()
    }
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the chart diptych",
        "definitions": definitions,
        **filled(top),
    }


def _model() -> Json:
    return closed(
        {
            "source": SOME_TEXT,
            "servedName": TEXT,
            "existingClaim": TEXT,
            "image": closed({"reference": TEXT, "pullPolicy": PULL_POLICY}),
            "cache": closed({"existingClaim": TEXT, "sizeLimit": QUANTITY}),
            "tokenSecret": closed({"name": TEXT, "key": SOME_TEXT}),
        }
    )


def _resources(**more: Json) -> Json:
    amount: Json = {"type": ["string", "number", "null"]}
    amounts: Json = {"type": "object", "additionalProperties": amount}
    return closed({"requests": amounts, "limits": amounts, **more})


def _pods(role: str) -> dict[str, Json]:
    """What routers and workers have in common."""
    timing = closed(
        {
            "periodSeconds": POSITIVE,
            "timeoutSeconds": POSITIVE,
            "failureThreshold": POSITIVE,
            "initialDelaySeconds": COUNT,
        }
    )
    scaling = closed(
        {
            "enabled": FLAG,
            "minReplicas": POSITIVE,
            "maxReplicas": POSITIVE,
            "metrics": ANY_LIST,
            "behavior": ANY_MAP,
        }
    )
    return {
        "replicas": COUNT,
        "settings": {"$ref": f"#/definitions/{role}Settings"},
        "autoscaling": scaling,
        "keda": _keda(role),
        "podDisruptionBudget": closed(
            {"enabled": FLAG, "maxUnavailable": {"type": ["integer", "string"]}}
        ),
        "terminationGracePeriodSeconds": SECONDS_OR_NONE,
        "resources": _resources(claims=ANY_LIST),
        "resourceClaims": ANY_LIST,
        "probes": closed({"startup": timing, "readiness": timing, "liveness": timing}),
        "topologySpreadConstraints": ANY_LIST,
        "nodeSelector": TEXTS,
        "tolerations": ANY_LIST,
        "affinity": ANY_MAP,
        "priorityClassName": TEXT,
        "runtimeClassName": TEXT,
        "schedulerName": TEXT,
        "podAnnotations": TEXTS,
        "podLabels": TEXTS,
        "extraEnv": ANY_LIST,
        "extraVolumes": ANY_LIST,
        "extraVolumeMounts": ANY_LIST,
        "initContainers": ANY_LIST,
    }


def _keda(role: str) -> Json:
    """How far KEDA scales a group, and by what."""
    by: dict[str, Json] = {"openRequests": POSITIVE}
    if role != "router":
        share: Json = {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
        by = {"waitingSequences": POSITIVE, "kvUsage": share, "placeUsage": share}
        by |= {"waitingRequests": POSITIVE}
    bounds: dict[str, Json] = {"minReplicas": POSITIVE, "maxReplicas": POSITIVE}
    return closed({"enabled": FLAG, **bounds, **by, "triggers": ANY_LIST})


def _router() -> Json:
    route: dict[str, Json] = {
        "enabled": FLAG,
        "annotations": TEXTS,
        "parentRefs": ANY_LIST,
        "hostnames": {"type": "array", "items": SOME_TEXT},
    }
    timeouts = closed(dict.fromkeys(("request", "backendRequest"), DURATION_OR_NONE))
    return closed(
        {
            **_pods("router"),
            "strategy": ANY_MAP,
            "preStopSeconds": COUNT,
            "service": closed(
                {
                    "type": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
                    "port": PORT,
                    "annotations": TEXTS,
                    "externalTrafficPolicy": {"enum": ["", "Cluster", "Local"]},
                    "loadBalancerClass": TEXT,
                }
            ),
            "discovery": {"enum": ["dns", "kubernetes"]},
            "http": closed({"enabled": FLAG, "port": PORT}),
            "publicTls": closed({"secretName": TEXT}),
            "apiKeys": closed({"secretName": TEXT, "key": SOME_TEXT}),
            "ingress": closed(
                {
                    "enabled": FLAG,
                    "port": {"enum": ["http", "grpc"]},
                    "className": TEXT,
                    "annotations": TEXTS,
                    "hosts": {"type": "array", "items": SOME_TEXT},
                    "tls": ANY_LIST,
                }
            ),
            "grpcRoute": closed(route),
            "httpRoute": closed({**route, "timeouts": {**timeouts, "type": ["object", "null"]}}),
        }
    )


def _workers(role: str) -> Json:
    pool: dict[str, Json] = {
        **_pods(role),
        "updateStrategy": ANY_MAP,
        "rdma": closed(
            {"enabled": FLAG, "resourceName": SOME_TEXT, "quantity": POSITIVE, "ipcLock": FLAG}
        ),
        "shmSize": QUANTITY_OR_NONE,
    }
    pools: Json = {
        "type": "object",
        "propertyNames": {"pattern": POOL_NAME},
        "additionalProperties": {**closed(pool), "type": ["object", "null"]},
    }
    return closed({**pool, "pools": pools})


def _settings(config: type[BaseModel]) -> Json:
    whole = config.model_json_schema(mode="validation")
    made = _reduced(whole, whole.get("$defs", {}))
    assert isinstance(made, dict)
    return made


def _reduced(schema: Mapping[str, Json], shared: Mapping[str, Json]) -> Json:
    """Keys, types and limits alone: texts and defaults would be out of date too easily."""
    reference = schema.get("$ref")
    if isinstance(reference, str):
        target = shared[reference.removeprefix("#/$defs/")]
        assert isinstance(target, dict)
        return _reduced(target, shared)
    properties = schema.get("properties")
    if isinstance(properties, dict):
        return closed(
            {
                name: _reduced(part, shared)
                for name, part in properties.items()
                if name not in _NOT_OFFERED and isinstance(part, dict)
            }
        )
    made: dict[str, Json] = {key: schema[key] for key in _CONSTRAINTS if key in schema}
    choices, items = schema.get("anyOf"), schema.get("items")
    if isinstance(choices, list):
        made["anyOf"] = [_reduced(part, shared) for part in choices if isinstance(part, dict)]
    if isinstance(items, dict):
        made["items"] = _reduced(items, shared)
    return made
