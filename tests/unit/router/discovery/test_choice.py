"""One source is chosen, and only that one has settings."""

import sys
from pathlib import Path

import pytest

from diptych import settings
from diptych.errors import ConfigurationError
from router.config import RouterConfig
from router.discovery.choice import choose
from router.discovery.dns import DnsDiscovery
from router.discovery.file import FileDiscovery
from router.discovery.kubernetes import KubernetesDiscovery
from router.discovery.source import StaticDiscovery


def load(*args: str) -> RouterConfig:
    return settings.load(
        RouterConfig, ["--model", "m", *args], prog="diptych router", env_prefix="DIPTYCH_ROUTER_"
    )


@pytest.mark.parametrize(
    ("args", "source"),
    [
        (["--decode", "a:1"], StaticDiscovery),
        (["--discovery", "file", "--file.path", "workers.yaml"], FileDiscovery),
        (["--discovery", "dns", "--dns.decode", "_grpc._tcp.decode"], DnsDiscovery),
    ],
)
def test_the_source_that_is_named_is_made(args: list[str], source: type) -> None:
    made = choose(load(*args), lambda: 5.0)
    assert isinstance(made, source)
    assert made.age_s == 0.0


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["--discovery", "file"], "--file.path: is required by --discovery file"),
        (
            ["--discovery", "file", "--file.path", "f", "--decode", "a:1"],
            "--decode: belongs to --discovery static, but that is file",
        ),
        (
            ["--decode", "a:1", "--file.interval-s", "3"],
            "--file.interval-s: belongs to --discovery file, but that is static",
        ),
        (["--discovery", "dns"], "--dns.decode: is required by --discovery dns"),
        (
            ["--discovery", "dns", "--dns.decode", "decode"],
            r"--dns.decode: expected name:port, or _port._tcp.name, found 'decode'",
        ),
        (["--discovery", "dns", "--dns.decode", "_g._tcp.d:1"], "--dns.decode: expected name.*"),
        (
            ["--discovery", "dns", "--dns.decode", "a:1", "--dns.decode", "a:1"],
            "--dns.decode: a name is listed twice",
        ),
        (
            ["--discovery", "dns", "--dns.decode", "a:1", "--dns.server", "dns.example:53"],
            r"--dns.server: expected ip:port \(got 'dns.example:53'\)",
        ),
        (["--decode", "a:1", "--dns.server", "10.0.0.1"], r"--dns.server: expected ip:port.*"),
        (["--discovery", "kubernetes"], "--kubernetes.decode: is required by .* kubernetes"),
        (
            ["--discovery", "kubernetes", "--kubernetes.decode", "a:1"],
            "--kubernetes.decode: expected the name of a service, found 'a:1'",
        ),
        (
            ["--decode", "a:1", "--kubernetes.namespace", "n"],
            "--kubernetes.namespace: belongs to --discovery kubernetes, but that is static",
        ),
        (["--discovery", "guess"], r"--discovery: Input should be .*\(got 'guess'\)"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(args: list[str], line: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{line}$"):
        load(*args)


def test_a_static_list_needs_a_decode_worker() -> None:
    with pytest.raises(ConfigurationError, match="--decode"):
        choose(load("--prefill", "a:1"), lambda: 0.0)


KUBERNETES = ["--discovery", "kubernetes", "--kubernetes.decode", "decode"]


async def test_kubernetes_is_asked_as_a_kubeconfig_says(tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(
        "current-context: c\n"
        "contexts: [{name: c, context: {cluster: c, user: u}}]\n"
        "clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}]\n"
        "users: [{name: u, user: {}}]\n"
    )
    config = load(*KUBERNETES, "--kubernetes.kubeconfig", str(path))
    assert isinstance(choose(config, lambda: 0.0), KubernetesDiscovery)


@pytest.mark.parametrize("content", [None, "{", "[]", "current-context: c"])
def test_a_wrong_kubeconfig_is_one_line(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "kubeconfig"
    if content is not None:
        path.write_text(content)
    config = load(*KUBERNETES, "--kubernetes.kubeconfig", str(path))
    with pytest.raises(ConfigurationError, match=r"^--kubernetes\.kubeconfig: ") as caught:
        choose(config, lambda: 0.0)
    assert "\n" not in caught.value.message


def test_without_the_extra_kubernetes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "router.discovery.kubernetes")
    monkeypatch.setitem(sys.modules, "lightkube", None)
    with pytest.raises(ConfigurationError, match="needs the extra of that name: lightkube"):
        choose(load(*KUBERNETES), lambda: 0.0)
