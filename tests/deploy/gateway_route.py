"""Whether a route is what Gateway API takes: by two schemas, one of others and one of ours.

An npm package has validators made of Gateway API's own types (gateway.networking.k8s.io/v1), which
let unknown keys through; it is fetched once into .cache/chart/. ``ROUTE`` lets none
through: the part that the chart may use of a GRPCRoute and of an HTTPRoute (which
alone has ``timeouts``), written after the standard channel's definition.
"""

import json
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.unit.deploy.chart import ROOT, Manifest
from tests.unit.deploy.values_schema import COUNT, PORT, SOME_TEXT, TEXT, Json, closed

_FOLDER = ROOT / ".cache" / "chart" / "gateway-api-2.0.0"
_PACKAGES = ("@kubernetes-models/gateway-api@2.0.0", "@kubernetes-models/apimachinery@3.0.2")
_VALIDATE = """
const route = JSON.parse(process.argv[1]);
const { validate } = await import(
  `@kubernetes-models/gateway-api/_schemas/IoK8sSigsGatewayApiApisV1${route.kind}`);
validate(route);
console.log(JSON.stringify(validate.errors ?? []));
"""

_HOST: Json = {
    "type": "string",
    "minLength": 1,
    "maxLength": 253,
    "pattern": r"^(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$",
}
_DURATION: Json = {"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}
_REFERENCE: dict[str, Json] = {
    "group": TEXT,
    "kind": SOME_TEXT,
    "namespace": SOME_TEXT,
    "name": SOME_TEXT,
    "port": PORT,
}


def _some(items: Json, at_most: int) -> Json:
    return {"type": "array", "maxItems": at_most, "items": items}


ROUTE = closed(
    {
        "apiVersion": {"const": "gateway.networking.k8s.io/v1"},
        "kind": {"enum": ["GRPCRoute", "HTTPRoute"]},
        "metadata": {"type": "object"},
        "spec": closed(
            {
                "parentRefs": _some(closed({**_REFERENCE, "sectionName": TEXT}, ("name",)), 32),
                "hostnames": _some(_HOST, 16),
                "rules": _some(
                    closed(
                        {
                            "name": SOME_TEXT,
                            "timeouts": closed({"request": _DURATION, "backendRequest": _DURATION}),
                            "backendRefs": _some(
                                closed({**_REFERENCE, "weight": COUNT}, ("name",)), 16
                            ),
                        }
                    ),
                    16,
                ),
            }
        ),
    },
    ("apiVersion", "kind", "metadata", "spec"),
)


def errors(route: Manifest) -> list[str]:
    """What Gateway API's types have against the route. Needs node and npm."""
    if not _FOLDER.exists():
        _FOLDER.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_FOLDER.parent) as folder:
            quiet = ("--silent", "--no-audit", "--no-fund", "--ignore-scripts")
            _run(Path(folder), "npm", "install", *quiet, "--prefix", "packages", *_PACKAGES)
            (Path(folder) / "packages").replace(_FOLDER)
    said = _run(_FOLDER, "node", "--input-type=module", "-e", _VALIDATE, json.dumps(route))
    return [f"{error['instancePath']}: {error['params']}" for error in json.loads(said)]


def _run(folder: Path, program: str, *args: str) -> str:
    found = shutil.which(program)
    if found is None:
        raise RuntimeError(f"{program} is needed to check a route")
    done = subprocess.run(
        [found, *args], cwd=folder, check=True, capture_output=True, text=True, timeout=240
    )
    return done.stdout
