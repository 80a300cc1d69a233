"""Whether custom resources fit the schemas that their makers publish. A program of its own.

Run by the interpreter of `make chart`'s tools, which has those schemas as models. They let
unknown keys through, so what a model does not give back was unknown, or of another type.
"""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

# Where the models of each kind are.
MODELS = {
    "PodMonitor": "cloudcoil.models.prometheus_operator.v1",
    "PrometheusRule": "cloudcoil.models.prometheus_operator.v1",
    "Certificate": "cloudcoil.models.cert_manager.v1",
    "ScaledObject": "cloudcoil.models.keda.v1alpha1",
}


def lost(given: object, kept: object, path: str) -> Iterator[str]:
    """Where ``kept`` lacks, or changed, what was given."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for key, value in given.items():
            if key in kept:
                yield from lost(value, kept[key], f"{path}.{key}")
            else:
                yield f"{path}.{key}: unknown"
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for index, (value, other) in enumerate(zip(given, kept, strict=True)):
            yield from lost(value, other, f"{path}[{index}]")
    elif given != kept:
        yield f"{path}: {given!r} became {kept!r}"


def errors(manifest: dict[str, object]) -> list[str]:
    """What a manifest of one of ``MODELS`` has that its schema has not."""
    kind = str(manifest["kind"])
    model = getattr(importlib.import_module(MODELS[kind]), kind)
    try:
        kept = model.model_validate(manifest).model_dump_json(by_alias=True, exclude_unset=True)
    except ValueError as error:  # pydantic's own is one
        return [f"{kind}: {error}"]
    return list(lost(manifest, json.loads(kept), kind))


def main() -> None:
    """Print, as JSON, how many of each kind the file has, and what is wrong with them."""
    text = Path(sys.argv[1]).read_text()
    custom = [m for m in yaml.safe_load_all(text) if m is not None and m["kind"] in MODELS]
    wrong = [error for manifest in custom for error in errors(manifest)]
    print(json.dumps({"kinds": [m["kind"] for m in custom], "wrong": wrong}))  # noqa: T201


if __name__ == "__main__":
    main()
