"""A container of the chart as a process of this machine: its command, environment and files here.

What a pod has of its own in a cluster is put in place: mounted folders become folders
here, and what Kubernetes fills in is filled in. All else stays as helm wrote it.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from diptych.models.source import DEFAULT_CACHE_DIR
from tests.unit.deploy.chart import ROOT, Pod

Done: TypeAlias = subprocess.CompletedProcess[str]
Secrets: TypeAlias = Mapping[str, Mapping[str, bytes]]
"""What each secret has under each of its keys."""

_REFERENCE = re.compile(r"\$\((\w+)\)")


def with_mounts(
    pod: Pod,
    settings: Mapping[str, object],
    folder: Path,
    secrets: Secrets = MappingProxyType({}),
) -> list[str]:
    """The container's arguments, with ``settings`` as its file and this machine's folders."""
    folder.mkdir()
    (folder / "settings.yaml").write_text(json.dumps(settings))
    args = [arg.replace("/etc/diptych", str(folder)) for arg in with_secrets(pod, folder, secrets)]
    return [arg.replace("=/cache", f"={DEFAULT_CACHE_DIR.expanduser()}") for arg in args]


def with_secrets(pod: Pod, folder: Path, secrets: Secrets) -> list[str]:
    """The container's arguments, with the secrets' files that they name put into ``folder``.

    An API server mounts more: a service account's token, which no argument names.
    """
    args = [str(arg) for arg in pod.container["args"]]
    mounts = {m["name"]: m["mountPath"] for m in pod.container.get("volumeMounts", [])}
    for volume in [each for each in pod.spec.get("volumes", []) if "secret" in each]:
        if not any(f"={mounts[volume['name']]}/" in arg for arg in args):
            continue
        content = secrets[volume["secret"]["secretName"]]
        whole = [{"key": key, "path": key} for key in content]
        place = folder / volume["name"]
        place.mkdir(parents=True)
        for item in volume["secret"].get("items", whole):
            (place / item["path"]).write_bytes(content[item["key"]])
        args = [arg.replace(f"={mounts[volume['name']]}/", f"={place}/") for arg in args]
    return args


def environment(pod: Pod, given: Mapping[str, str]) -> dict[str, str]:
    """The container's variables; ``given`` says what Kubernetes fills in, by variable.

    Kernels that were compiled before are used again: a pod has them nowhere.
    """
    known = dict(given)
    for item in pod.container["env"]:
        text = str(item.get("value", given.get(item["name"], "here")))
        known[item["name"]] = _REFERENCE.sub(lambda found: known[found[1]], text)
    kernels = {"NUMBA_CACHE_DIR": str(DEFAULT_CACHE_DIR.expanduser() / "kernels")}
    return whole_environment({**known, **kernels})


def whole_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Nothing of this machine's but the programs' folders."""
    return {"PATH": os.defpath, "HOME": "/nonexistent", **variables}


def command(args: Sequence[str]) -> list[str]:
    """What the image's ``diptych`` is here."""
    return [sys.executable, "-m", "diptych.cli", *args]


def run(args: Sequence[str], timeout_s: float) -> Done:
    """Run ``diptych`` to its end."""
    return subprocess.run(
        command(args),
        env=whole_environment({}),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
