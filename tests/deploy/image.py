"""Builds deploy/Containerfile by buildah, and runs programs in it as a cluster would.

Without rights beyond its user's, on a root file system that cannot be written, with /cache
and /tmp alone of its own. Where the recipe's base cannot be pulled, one is made of Debian's
packages: the recipe is what is tried.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from tests.unit.deploy.chart import ROOT

_STORAGE = ROOT / ".cache" / "image" / "storage"
_TAG, _BASE_TAG = "localhost/diptych:test", "localhost/diptych-base:test"
_CONTAINERFILE = ROOT / "deploy" / "Containerfile"
_BUILD_S = 3000.0
# Of pip's settings, those that say where packages are.
_PIP = {
    "find-links": "PIP_FIND_LINKS",
    "cert": "PIP_CERT",
    "index-url": "PIP_INDEX_URL",
    "timeout": "PIP_DEFAULT_TIMEOUT",
}


class NoBuilderError(Exception):
    """The image cannot be built on this machine; says why."""


@dataclass(frozen=True)
class Image:
    """The image that was built: what it says of itself, and where its files are mounted."""

    base: str
    root: Path
    user: str
    env: dict[str, str]
    entrypoint: tuple[str, ...]
    health: tuple[str, ...]

    def run(self, script: str, cache: Path, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """A shell script in the image, in a network of its own; ``cache`` lies at /cache."""
        mounts = (
            f"mount --bind {self.root} {self.root}",
            f"mount -o remount,bind,ro {self.root}",
            f"mount -t tmpfs tmpfs {self.root}/tmp",
            f"mount --bind {cache} {self.root}/cache",
            f"mount -t proc proc {self.root}/proc",
            f"mount -t sysfs -o ro sysfs {self.root}/sys",  # as containers have it: UCX looks there
            f"mount --rbind /dev {self.root}/dev",
            "ip link set lo up",
            f"cd {self.root}",
            f'exec chroot --userspec={self.user} {self.root} /bin/sh -euc "$0"',
        )
        namespaces = ("--mount", "--pid", "--fork", "--kill-child", "--net", "--ipc")
        return subprocess.run(
            ["unshare", *namespaces, "sh", "-euc", "\n".join(mounts), script],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )


def build(scratch: Path) -> Image:
    """The image for CPUs, with the torch that is installed here; minutes.

    Raises NoBuilderError. Raises CalledProcessError: the recipe is wrong.
    """
    _check_tools()
    base = _base(scratch)
    _buildah(
        *("build", "--isolation=chroot", "--pull-never", "--format=docker", f"--tag={_TAG}"),
        *(f"--file={_CONTAINERFILE}", f"--build-arg=BASE={base}", *_packages(scratch), str(ROOT)),
        timeout_s=_BUILD_S,
    )
    about = json.loads(_buildah("inspect", "--type=image", _TAG))["Docker"]["config"]
    root = Path(_buildah("mount", _buildah("from", "--pull-never", _TAG)))
    return Image(
        base=base,
        root=root,
        user=about["User"],
        env=dict(item.split("=", 1) for item in about["Env"]),
        entrypoint=tuple(about["Entrypoint"]),
        health=tuple(about["Healthcheck"]["Test"]),
    )


def remove() -> None:
    """All containers and images of this module. Idempotent."""
    if shutil.which("buildah") is not None and _STORAGE.exists():
        _buildah("rm", "--all")
        _buildah("rmi", "--all", "--force")


def _check_tools() -> None:
    missing = [name for name in ("buildah", "unshare", "chroot", "ip") if not shutil.which(name)]
    if missing:
        raise NoBuilderError(f"{', '.join(missing)}: not installed")
    if os.geteuid() != 0:
        raise NoBuilderError("only root may mount what was built, to run it read-only")


def _base(scratch: Path) -> str:
    """The recipe's own base where a registry has it, else one of Debian's packages."""
    named = "ARG BASE="
    lines = _CONTAINERFILE.read_text().splitlines()
    (base,) = [line.removeprefix(named) for line in lines if line.startswith(named)]
    try:
        _buildah("pull", base)
    except subprocess.CalledProcessError as error:
        if shutil.which("debootstrap") is None:
            why = error.stderr.strip().splitlines()[-1]
            raise NoBuilderError(f"{base} cannot be pulled, nor made: {why}") from error
        _make_base(scratch)
        return _BASE_TAG
    return base


def _make_base(scratch: Path) -> None:
    root, packages = scratch / "base", "python3,python3-venv,ca-certificates"
    command = ["debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", str(root)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    if made.returncode:
        raise NoBuilderError(f"no base of Debian's packages: {made.stdout.strip()[-300:]}")
    (root / "usr/bin/python").symlink_to("python3")
    container = _buildah("from", "scratch")
    _buildah("add", "--quiet", container, str(root), "/")
    _buildah("commit", "--quiet", "--rm", container, _BASE_TAG)
    shutil.rmtree(root)


def _packages(scratch: Path) -> Sequence[str]:
    """pip finds in the build what it finds here, and takes the torch that is installed here."""
    constraint, config = scratch / "constraint.txt", scratch / "pip.conf"
    constraint.write_text(f"torch=={version('torch')}\n")
    said = {name: os.environ[key] for name, key in _PIP.items() if key in os.environ}
    lines = ["[install]", "constraint = /constraint.txt", "[global]"]
    lines += [f"{name} = {value}" for name, value in said.items()]
    config.write_text("\n".join(lines) + "\n")
    mounts = [f"--volume={path}:{path}:ro" for path in said.values() if Path(path).exists()]
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple")
    return (
        f"--build-arg=TORCH_INDEX={index}",
        f"--volume={constraint}:/constraint.txt:ro",
        f"--volume={config}:/etc/pip.conf:ro",
        *mounts,
    )


def _buildah(*args: str, timeout_s: float = 600.0) -> str:
    """Standard output. Raises CalledProcessError, with what it said."""
    _STORAGE.mkdir(parents=True, exist_ok=True)
    store = (f"--root={_STORAGE}", f"--runroot={_STORAGE}-run", "--storage-driver=vfs")
    done = subprocess.run(
        ["buildah", *store, *args],
        check=True,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    return done.stdout.strip()
