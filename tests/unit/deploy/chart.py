"""The chart and what helm makes of it, without helm: rendered manifests lie beside this module.

``make manifests`` renders them, and writes the digest of the chart that they were made of.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).parents[3]
CHART = ROOT / "deploy" / "helm" / "diptych"
RENDERED = Path(__file__).parent / "rendered"
DIGEST = RENDERED / "chart.sha256"
NAMESPACE = "serving"
RELEASE = "try"

# What is rendered, by name: the values files given to helm.
VALUES: Mapping[str, tuple[Path, ...]] = {
    "default": (),
    "cpu": (CHART / "values-cpu.yaml",),
    "gpu": (CHART / "values-gpu.yaml",),
    "nvlink": (CHART / "values-nvlink.yaml",),
    "rdma": (CHART / "values-rdma.yaml",),
    "everything": (Path(__file__).parent / "everything.yaml",),
    "jwt": (Path(__file__).parent / "jwt.yaml",),
}
# With one more whose names look like numbers, of which nothing but that is looked at.
ALL_VALUES: Mapping[str, tuple[Path, ...]] = {
    **VALUES,
    "numbers": (Path(__file__).parent / "numbers.yaml",),
}

Manifest = Mapping[str, Any]


class Pod(NamedTuple):
    """A pod that some manifest describes."""

    where: str  # rendering, kind and name
    manifest: Manifest  # that has it
    labels: Mapping[str, str]
    spec: Mapping[str, Any]

    @property
    def container(self) -> Mapping[str, Any]:
        (only,) = self.spec["containers"]
        return dict(only)

    @property
    def command(self) -> str:
        """What ``diptych`` is told to run: a role, or generate."""
        return str(self.container["args"][0])


def chart_digest() -> str:
    """Of all files that are rendered, and of the values they are rendered with."""
    extra = {path for paths in ALL_VALUES.values() for path in paths if CHART not in path.parents}
    digest = hashlib.sha256()
    for path in sorted({path for path in CHART.rglob("*") if path.is_file()} | extra):
        digest.update(f"{path.relative_to(ROOT)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def with_defaults(values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> Manifest:
    """What helm makes of values before it looks at the schema: null takes a default away."""
    if defaults is None:
        defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    made = {**defaults, **values}
    for key, value in values.items():
        default = defaults.get(key)
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            made[key] = with_defaults(value, default)
        elif value is None and default is not None:
            del made[key]
    return made


@cache
def rendered(name: str) -> tuple[Manifest, ...]:
    """The manifests of one rendering."""
    return parsed((RENDERED / f"{name}.yaml").read_text())


def parsed(text: str) -> tuple[Manifest, ...]:
    """The manifests in what helm wrote."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return tuple(manifest for manifest in yaml.load_all(text, loader) if manifest is not None)


def named(manifests: Iterable[Manifest], kind: str, name: str) -> Manifest:
    """The one manifest of that kind and name."""
    (found,) = [m for m in manifests if m["kind"] == kind and m["metadata"]["name"] == name]
    return found


def pods(name: str) -> list[Pod]:
    """Every pod of a rendering, the test's included."""
    return pods_of(rendered(name), name)


def pods_of(manifests: Iterable[Manifest], name: str) -> list[Pod]:
    """Every pod of these manifests, which are those of rendering ``name``."""
    found = []
    for manifest in manifests:
        where = f"{name}: {manifest['kind']} {manifest['metadata']['name']}"
        if manifest["kind"] == "Pod":
            labels = manifest["metadata"]["labels"]
            found.append(Pod(where, manifest, labels, manifest["spec"]))
        elif manifest["kind"] in ("Deployment", "StatefulSet"):
            template = manifest["spec"]["template"]
            labels = template["metadata"]["labels"]
            found.append(Pod(where, manifest, labels, template["spec"]))
    return found


def all_pods() -> list[Pod]:
    """Of every rendering."""
    return [pod for name in VALUES for pod in pods(name)]


def servers() -> list[Pod]:
    """All pods that serve."""
    return [pod for pod in all_pods() if pod.command != "generate"]


def settings_text(pod: Pod) -> str:
    """The file of settings that is mounted into the pod."""
    name = pod.where.partition(":")[0]
    (volume,) = [volume for volume in pod.spec["volumes"] if volume["name"] == "settings"]
    found = named(rendered(name), "ConfigMap", volume["configMap"]["name"])
    return str(found["data"]["settings.yaml"])


def values_schema_text() -> str:
    """The schema as it lies in the chart."""
    return (CHART / "values.schema.json").read_text()


def json_text(value: object) -> str:
    """As ``make manifests`` writes JSON."""
    return json.dumps(value, indent=2) + "\n"
