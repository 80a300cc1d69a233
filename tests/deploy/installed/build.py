"""Builds an API server and its controllers of Debian's source package; etcd is Debian's own.

No package has them as programs. apt fetches what is needed into a folder of its own, which needs
no rights, and nothing is installed: ``python -m tests.deploy.installed.build``. Ten minutes of two
cores, once; gigabytes while it runs.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from diptych.models.demo import demo_folder
from diptych.models.source import DEFAULT_CACHE_DIR
from diptych.progress import ConsoleProgress, Progress
from tests.deploy.helm import HELM_4, helm_binary

VERSION = "1.20.2"
BINARIES = DEFAULT_CACHE_DIR.expanduser() / "kubernetes" / VERSION
_PROGRAMS = ("kube-controller-manager", "kube-apiserver")
# In Debian 12. The compiler needs a newer reflect2 than Kubernetes brings.
_SOURCE = "kubernetes"
_PACKAGES = (
    *("golang-1.19-go", "golang-1.19-src", "golang-github-modern-go-reflect2-dev"),
    "etcd-server",
)
_REFLECT = "github.com/modern-go/reflect2"
_SOURCES = Path("/etc/apt/sources.list.d/debian.sources")
_VERSION_NAMES = "k8s.io/kubernetes/vendor/k8s.io/component-base/version"
_GENERATOR = "vendor/k8s.io/kube-openapi/cmd/openapi-gen"
# Clouds are a third of what would be compiled.
_WITHOUT = "-tags=providerless,dockerless"
_NOT_SERVED = ("code-generator", "sample-apiserver", "kube-openapi")
_STEP_S = 3 * 3600


class NoBuildError(Exception):
    """It cannot be built on this machine; says why."""


def build(progress: Progress) -> None:
    """All programs are in BINARIES; done if they are there already. Raises NoBuildError."""
    wanted = [BINARIES / name for name in (*_PROGRAMS, "etcd")]
    if all(path.exists() for path in wanted):
        return
    BINARIES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BINARIES.parent, prefix="build-") as folder:
        _Build(Path(folder), progress).run()


class _Build:
    """One build, in a folder that goes afterwards."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        self._folder = folder
        self._progress = progress
        self._tools = folder / "tools"  # what packages have
        self._go = self._tools / "usr/lib/go-1.19"
        self._tree = folder / "src/k8s.io/kubernetes"  # as the compiler finds packages by names

    def run(self) -> None:
        self._fetch()
        self._unpack()
        self._generate()
        flags = f"-s -w -X {_VERSION_NAMES}.gitVersion=v{VERSION}"
        parts = dict(zip(("gitMajor", "gitMinor"), VERSION.split("."), strict=False))
        flags += "".join(f" -X {_VERSION_NAMES}.{name}={part}" for name, part in parts.items())
        for name in _PROGRAMS:
            self._compile(f"./cmd/{name}", name, flags)
            (self._folder / name).replace(BINARIES / name)
        (self._tools / "usr/bin/etcd").rename(BINARIES / "etcd")

    def _fetch(self) -> None:
        """Packages and the source, checked by apt."""
        if not _SOURCES.exists():
            raise NoBuildError(f"{_SOURCES}: not there: this needs Debian 12")
        for part in ("parts", "state/lists/partial", "cache/archives/partial"):
            (self._folder / "apt" / part).mkdir(parents=True)
        listed = _SOURCES.read_text().replace("Types: deb\n", "Types: deb deb-src\n")
        (self._folder / "apt/parts/debian.sources").write_text(listed)
        self._progress("fetching packages", 0)
        self._apt("update")
        self._progress("fetching packages", 0.3)
        self._apt("download", *_PACKAGES)
        self._apt("source", "--download-only", _SOURCE)
        self._progress("fetching packages", 1)

    def _apt(self, *args: str) -> None:
        folder = self._folder / "apt"
        options = {
            "Dir::Etc::sourcelist": "/dev/null",
            "Dir::Etc::sourceparts": folder / "parts",
            "Dir::State": folder / "state",
            "Dir::State::status": "/var/lib/dpkg/status",
            "Dir::Cache": folder / "cache",
            "APT::Sandbox::User": "root",
        }
        flags = [f"--option={name}={value}" for name, value in options.items()]
        _run(["apt-get", "--quiet", *flags, *args], folder, os.environ)

    def _unpack(self) -> None:
        fetched = self._folder / "apt"
        for package in fetched.glob("*.deb"):
            _run(["dpkg-deb", "--extract", str(package), str(self._tools)], fetched, os.environ)
        (described,) = fetched.glob(f"{_SOURCE}_*.dsc")
        if VERSION not in described.name:
            raise NoBuildError(f"{described.name} is not {VERSION}: this needs Debian 12")
        self._tree.parent.mkdir(parents=True)
        unpack = ["dpkg-source", "--no-check", "--extract", str(described), str(self._tree)]
        _run(unpack, fetched, os.environ)
        shutil.rmtree(self._tree / "vendor" / _REFLECT)
        newer = self._tools / "usr/share/gocode/src" / _REFLECT
        shutil.copytree(newer, self._tree / "vendor" / _REFLECT)

    def _generate(self) -> None:
        """What the source package leaves out: the schemas of all that is served."""
        self._compile(f"./{_GENERATOR}", "openapi-gen", "-s -w")
        roots = [self._tree / name for name in ("pkg", "cmd", "plugin")]
        staged = (self._tree / "staging/src/k8s.io").iterdir()
        roots += [root for root in staged if root.name not in _NOT_SERVED]
        tagged = {
            path.parent
            for root in roots
            for path in root.rglob("*.go")
            if "+k8s:openapi-gen=" in path.read_text(errors="replace")
        }
        names = sorted(str(path.relative_to(self._tree)) for path in tagged)
        served = [name.replace("staging/src/", "vendor/", 1) for name in names]
        self._progress("generating schemas", 0)
        command = [
            *(str(self._folder / "openapi-gen"), "--logtostderr", "-O", "zz_generated.openapi"),
            *("-i", ",".join(f"k8s.io/kubernetes/{name}" for name in served)),
            *("-p", "k8s.io/kubernetes/pkg/generated/openapi"),
            *("-h", "vendor/k8s.io/code-generator/hack/boilerplate.go.txt"),
            *("-r", str(self._folder / "violations")),
        ]
        _run(command, self._tree, self._environment())
        self._progress("generating schemas", 1)

    def _compile(self, package: str, name: str, flags: str) -> None:
        """One program into the folder; told by the packages that it is made of."""
        environment = self._environment()
        go = str(self._go / "bin/go")
        listed = _run([go, "list", "-deps", _WITHOUT, package], self._tree, environment)
        num_packages, stage = len(listed.split()), f"compiling {name}"
        self._progress(stage, 0)
        command = [
            *(go, "build", "-v", _WITHOUT, "-gcflags=all=-dwarf=false", f"-ldflags={flags}"),
            *("-o", str(self._folder / name), package),
        ]
        with _running(command, self._tree, environment) as lines:
            for number, _ in enumerate(lines, 1):
                self._progress(stage, min(0.95, number / num_packages))
        self._progress(stage, 1)

    def _environment(self) -> Mapping[str, str]:
        return {
            "PATH": f"{self._go / 'bin'}:{os.defpath}",
            "HOME": str(self._folder),
            "GOROOT": str(self._go),
            "GOPATH": str(self._folder),
            "GOCACHE": str(self._folder / "compiled"),
            "GO111MODULE": "off",
            "GOPROXY": "off",
            "CGO_ENABLED": "0",
        }


def _run(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> str:
    """Standard output. Raises NoBuildError, with what it said last."""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_STEP_S,
            check=False,
        )
    except OSError as error:
        raise NoBuildError(f"{command[0]}: {error.strerror}") from None
    if done.returncode:
        raise NoBuildError(f"{command[0]}: {done.stderr.strip()[-500:]}")
    return done.stdout


@contextmanager
def _running(
    command: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> Iterator[Iterator[str]]:
    """What it says, line by line. Raises NoBuildError: it failed."""
    last: list[str] = []
    with subprocess.Popen(
        command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stderr is not None, "as asked"

        def lines(said: Iterator[str]) -> Iterator[str]:
            for line in said:
                last[:] = [*last[-9:], line]
                yield line

        yield lines(iter(child.stderr))
    if child.returncode:
        raise NoBuildError(f"{command[0]}: {''.join(last)}")


def main() -> int:
    """Build and fetch whatever the run in a network of its own needs."""
    try:
        with ConsoleProgress() as progress:
            build(progress)
            helm_binary(HELM_4)
            demo_folder(DEFAULT_CACHE_DIR.expanduser(), progress)
    except NoBuildError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
