"""Both helms take the chart as it is, render the same, and refuse wrong values by their names."""

import json
from pathlib import Path

import pytest

from diptych import __version__
from diptych.models.demo import DEMO_NAME
from tests.deploy.helm import HELM_3, HELM_4, Release, run_helm, template
from tests.deploy.manifests import render
from tests.unit.deploy.chart import (
    ALL_VALUES,
    CHART,
    RELEASE,
    RENDERED,
    ROOT,
    VALUES,
    parsed,
    pods_of,
    values_schema_text,
)
from tests.unit.deploy.test_readme import commands
from tests.unit.deploy.values_schema import values_schema
from tests.unit.deploy.wrong_values import WRONG, Wrong

HELMS = [
    pytest.param(HELM_3, id="helm-3"),
    pytest.param(HELM_4, id="helm-4"),
]
# Another name, namespace and version than those that the renderings have.
OLDEST, NEWEST = "1.29.0", "1.37.0"
UCX = "DIPTYCH_PREFILL_TRANSFER__UCX_"
NO_DEVICE = r"-prefill-main: rdma\.enabled, but .*ucx_net_devices \({}\) names no such device"


def rdma(*environment: str, **transfer: object) -> object:
    """Values of a pool with RDMA devices, those variables and those settings."""
    settings = {"transfer": {"transports": ["nixl", "inline"], **transfer}}
    told = [{"name": name, "value": "told there"} for name in environment]
    return {"prefill": {"rdma": {"enabled": True}, "extraEnv": told, "settings": settings}}


@pytest.mark.parametrize("helm", HELMS)
@pytest.mark.parametrize("name", VALUES)
def test_lint(helm: Release, name: str) -> None:
    files = [f"--values={path}" for path in VALUES[name]]
    done = run_helm(helm, "lint", "--strict", str(CHART), *files)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("helm", HELMS)
@pytest.mark.parametrize("name", ALL_VALUES)
def test_both_helms_render_what_is_kept(helm: Release, name: str) -> None:
    kept = parsed((RENDERED / f"{name}.yaml").read_text())
    for version in (OLDEST, NEWEST):
        now = parsed(template(helm, ALL_VALUES[name], f"--kube-version={version}"))
        assert now == kept, "run `make manifests`"


@pytest.mark.parametrize("name", ALL_VALUES)
def test_the_kept_text_is_what_make_manifests_writes(name: str) -> None:
    assert render(name) == (RENDERED / f"{name}.yaml").read_text(), "run `make manifests`"


def test_the_schema_knows_all_settings_of_the_program() -> None:
    assert json.loads(values_schema_text()) == values_schema(), "run `make manifests`"


@pytest.mark.parametrize("helm", HELMS)
@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: f"{wrong.key}-{WRONG.index(wrong)}")
def test_a_wrong_value_is_refused_and_named(helm: Release, wrong: Wrong, tmp_path: Path) -> None:
    path = tmp_path / "values.yaml"
    path.write_text(json.dumps(wrong.values))
    with pytest.raises(RuntimeError) as caught:
        template(helm, [path])
    assert "values don't meet the specifications of the schema" in str(caught.value)
    assert wrong.key in str(caught.value)


@pytest.mark.parametrize("helm", HELMS)
def test_the_readmes_installation_is_taken_as_it_stands(
    helm: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    (line,) = [line for line in commands("Install with Helm") if line[:2] == ["helm", "install"]]
    monkeypatch.chdir(ROOT)
    done = run_helm(helm, "template", *line[2:])
    assert done.returncode == 0, done.stderr
    (repository,) = [each for each in line if each.startswith("image.repository=")]
    assert f"image: {repository.partition('=')[2]}:{__version__}" in done.stdout


@pytest.mark.parametrize("helm", HELMS)
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"decode": {"replicas": 0}}, "at least one decode worker is needed"),
        (
            {"model": {"existingClaim": "a", "image": {"reference": "b"}}},
            "existingClaim and image.reference are both mounted",
        ),
        (
            {
                "keda": {"serverAddress": "http://prometheus:9090"},
                "decode": {"autoscaling": {"enabled": True}, "keda": {"enabled": True}},
            },
            "autoscaling and keda would scale the same pods",
        ),
        ({"router": {"keda": {"enabled": True}}}, "keda.serverAddress"),
        (
            {"router": {"ingress": {"enabled": True, "hosts": ["a"]}, "http": {"enabled": False}}},
            "router.ingress.port: http is off",
        ),
        (
            {"router": {"discovery": "kubernetes", "settings": {"dns": {"interval_s": 2}}}},
            "router.settings.dns: belongs to router.discovery dns, but that is kubernetes",
        ),
        ({"router": {"ingress": {"enabled": True}}}, "router.ingress.hosts"),
        (
            {"decode": {"podLabels": {"app.kubernetes.io/name": "llm"}}},
            "-decode-main: podLabels: by app.kubernetes.io/name pods are found",
        ),
        (
            {"decode": {"podLabels": {"app.kubernetes.io/version": "2"}}},
            "-decode-main: podLabels: app.kubernetes.io/version is the chart's own",
        ),
        (
            {"router": {"podAnnotations": {"checksum/settings": "2"}}},
            "-router: podAnnotations: checksum/settings is the chart's own",
        ),
        (
            {"metrics": {"alerts": {"labels": {"helm.sh/chart": "a"}}}},
            "metrics.alerts.labels: helm.sh/chart is the chart's own",
        ),
        (
            {"prefill": {"extraVolumes": [{"name": "tmp", "emptyDir": {}}]}},
            "-prefill-main: extraVolumes: tmp is the chart's own",
        ),
        (
            {"router": {"extraVolumeMounts": [{"name": "cache", "mountPath": "/tmp"}]}},
            "-router: extraVolumeMounts: /tmp is the chart's own",
        ),
        (
            {"router": {"service": {"externalTrafficPolicy": "Local"}}},
            "router.service.externalTrafficPolicy: is of NodePort and LoadBalancer",
        ),
        (
            {"router": {"service": {"type": "NodePort", "loadBalancerClass": "a"}}},
            "router.service.loadBalancerClass: is of LoadBalancer, but .* is NodePort",
        ),
        (
            {"router": {"service": {"port": 443}, "http": {"port": 443}}},
            "router.http.port: 443 is router.service.port too",
        ),
        (
            {"decode": {"settings": {"device": "cuda"}, "resources": None}},
            "-decode-main: settings.device is cuda, and no GPU is asked for",
        ),
        ({"router": {"grpcRoute": {"enabled": True}}}, "router.grpcRoute.parentRefs"),
        (
            {
                "router": {
                    "http": {"enabled": False},
                    "httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}]},
                }
            },
            "router.httpRoute: http is off",
        ),
        (
            {"prefill": {"resources": {"claims": [{"name": "gpu"}]}}},
            "-prefill-main: resources.claims: resourceClaims has none of the name gpu",
        ),
        ({"metrics": {"enabled": False, "podMonitor": {"enabled": True}}}, "metrics.podMonitor"),
        ({"metrics": {"enabled": False, "alerts": {"enabled": True}}}, "metrics.alerts"),
        (
            {
                "metrics": {"enabled": False},
                "keda": {"serverAddress": "http://prometheus:9090"},
                "prefill": {"keda": {"enabled": True}},
            },
            "-prefill-main: keda scales by metrics that no pod tells",
        ),
        (
            {"decode": {"terminationGracePeriodSeconds": 20}},
            r"decode: terminationGracePeriodSeconds: 20 cuts off what takes 20\.5 s",
        ),
        (
            {"router": {"terminationGracePeriodSeconds": 60}},
            r"router: terminationGracePeriodSeconds: 60 cuts off what takes 640\.5 s",
        ),
        (
            {"decode": {"pools": {"a": {"autoscaling": {"enabled": True, "minReplicas": 5}}}}},
            r"-decode-a: autoscaling\.minReplicas is more",
        ),
        (
            {
                "keda": {"serverAddress": "http://prometheus:9090"},
                "router": {"keda": {"enabled": True, "minReplicas": 5}},
            },
            r"-router: keda\.minReplicas is more",
        ),
        (
            {
                "decode": {
                    "settings": {"device": "cuda", "tensor_parallel": 4},
                    "resources": {"limits": {"nvidia.com/gpu": 1}},
                }
            },
            r"-decode-main: tensor_parallel is 4, .* \(nvidia\.com/gpu is 1\)",
        ),
        (
            {"decode": {"settings": {"device": "cuda"}}},
            r"-decode-main: settings\.device is cuda, and no GPU .* \(nvidia\.com/gpu: 1\)",
        ),
        (
            {
                "prefill": {
                    "settings": {
                        "device": "cuda",
                        "transfer": {"transports": ["nixl"], "ucx_net_devices": "mlx5_0:1"},
                    },
                    "resources": {"limits": {"nvidia.com/gpu": 0}},
                    "rdma": {"enabled": True, "resourceName": "nvidia.com/hostdev"},
                }
            },
            "-prefill-main: settings.device is cuda, and no GPU is asked for",
        ),
        (
            {"prefill": {"rdma": {"enabled": True}}},
            r"-prefill-main: rdma\.enabled, but .*: say \[nixl, inline\]",
        ),
        (rdma(), NO_DEVICE.format("lo")),
        (rdma(ucx_tls=["rc", "cuda_copy"]), NO_DEVICE.format("lo")),
        (rdma(f"{UCX}TLS"), NO_DEVICE.format("lo")),
        (rdma("UCX_NET_DEVICES", ucx_net_devices="eth0"), NO_DEVICE.format("eth0")),
        ({"router": {"apiKeys": {"secretName": "a"}}}, "tests.apiKey.secretName"),
        ({"router": {"settings": {"jwt": {"issuer": "https://a"}}}}, "tests.apiKey.secretName"),
    ],
)
def test_values_that_make_no_cluster_are_refused(
    helm: Release, values: object, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "values.yaml"
    path.write_text(json.dumps(values))
    with pytest.raises(RuntimeError, match=message):
        template(helm, [path])


@pytest.mark.parametrize("helm", HELMS)
@pytest.mark.parametrize("name", ["my.release", "1st", "a-release-of-many-lette.rs"])
def test_a_release_after_which_no_service_can_be_called_has_to_have_another_name(
    helm: Release, name: str
) -> None:
    with pytest.raises(RuntimeError, match=f"fullnameOverride: {name}"):
        template(helm, name=name)
    assert "name: own-router\n" in template(helm, (), "--set=fullnameOverride=own", name=name)


@pytest.mark.parametrize("helm", HELMS)
@pytest.mark.parametrize(
    "values",
    [
        rdma(ucx_net_devices="eth0,mlx5_0:1"),
        rdma(ucx_net_devices="all", ucx_tls=["rc", "cuda_copy"]),
        rdma(f"{UCX}TLS", ucx_net_devices="all"),
        rdma(f"{UCX}NET_DEVICES"),
    ],
)
def test_rdma_devices_may_be_named_in_any_way_that_the_program_takes(
    helm: Release, values: object, tmp_path: Path
) -> None:
    path = tmp_path / "values.yaml"
    path.write_text(json.dumps(values))
    template(helm, [path])


@pytest.mark.parametrize("helm", HELMS)
def test_a_cluster_may_pick_whom_pods_run_as(helm: Release) -> None:
    """As OpenShift does: an id of ours would be refused."""
    unset = [f"--set=podSecurity.{key}=null" for key in ("runAsUser", "runAsGroup", "fsGroup")]
    for pod in pods_of(parsed(template(helm, [], *unset)), "here"):
        assert pod.spec["securityContext"] == {
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        }


@pytest.mark.parametrize("helm", HELMS)
def test_a_grace_period_that_is_long_enough_is_taken(helm: Release, tmp_path: Path) -> None:
    path = tmp_path / "values.yaml"
    path.write_text("prefill: {terminationGracePeriodSeconds: 21}")
    periods = {
        pod.command: pod.spec.get("terminationGracePeriodSeconds")
        for pod in pods_of(parsed(template(helm, [path])), "here")
    }
    assert periods == {"router": 651, "prefill": 21, "decode": 31, "generate": None}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("default", "Off: tls.enabled, router.publicTls, router.apiKeys, router.settings.jwt."),
        ("jwt", "Off: tls.enabled, router.publicTls."),
        ("jwt", "with a token of https://login.example.com in the file `key`:"),
        ("jwt", "diptych generate --api-key-file key "),
        ("jwt", '/v1/chat/completions -H "authorization: Bearer $(cat key)" '),
        ("default", "curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type:"),
        ("default", f'"model": "{DEMO_NAME}", '),
        ("gpu", '"model": "Qwen/Qwen3-8B", '),
        ("everything", r"get secret public --output jsonpath='{.data.ca\.crt}' | base64 --decode"),
        ("everything", "generate --ca ca.crt --server-name d-router --api-key-file key "),
    ],
)
def test_the_notes_say_what_is_locked_and_how_to_ask(name: str, said: str) -> None:
    """By helm 4: helm 3 tells them to whoever has a cluster alone."""
    files = [f"--values={path}" for path in VALUES[name]]
    done = run_helm(HELM_4, "install", "--dry-run=client", RELEASE, str(CHART), *files)
    assert said in done.stdout.partition("NOTES:")[2], done.stderr


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            (),
            ", then let the cluster test itself: one request, whose KV has to move and whose trace",
        ),
        (("prefill.replicas=0",), ": one request, whose trace, if there is one, has to be sent."),
        (("tests.enabled=false",), "Wait for the workers to load.\n"),
    ],
)
def test_the_notes_promise_no_test_that_there_is_not(values: tuple[str, ...], said: str) -> None:
    flags = [f"--set={value}" for value in values]
    done = run_helm(HELM_4, "install", "--dry-run=client", RELEASE, str(CHART), *flags)
    notes = done.stdout.partition("NOTES:")[2]
    assert said in notes, done.stderr
    assert (f" test {RELEASE} --logs" in notes) is ("tests.enabled=false" not in values)


@pytest.mark.parametrize(
    ("values", "is_said"),
    [
        ((), False),
        (("decode.settings.block_size=32",), False),  # what prefill's is, nobody said
        (("prefill.settings.block_size=16", "decode.settings.block_size=32"), True),
        (("prefill.settings.dtype=auto", "decode.settings.dtype=float32"), False),
        (("prefill.settings.kv_cache_dtype=fp8", "decode.settings.kv_cache_dtype=int8"), True),
        (
            (
                "prefill.settings.block_size=16",
                "decode.settings.block_size=32",
                "decode.pools.other.settings.block_size=16",
            ),
            False,
        ),
        (
            (
                "prefill.settings.block_size=16",
                "decode.settings.block_size=32",
                "decode.settings.roles={prefill,decode}",
            ),
            False,
        ),
        (
            (
                "prefill.settings.block_size=16",
                "prefill.replicas=0",
                "decode.settings.block_size=32",
            ),
            False,
        ),
    ],
)
def test_the_notes_say_where_no_two_pools_make_a_pair(
    values: tuple[str, ...], is_said: bool
) -> None:
    flags = [f"--set={value}" for value in values]
    done = run_helm(HELM_4, "install", "--dry-run=client", RELEASE, str(CHART), *flags)
    assert done.returncode == 0, done.stderr
    assert ("\n\nNo prefill pool has block_size, dtype and " in done.stdout) is is_said


WAYS_IN = (
    "router.ingress.enabled=true",
    "router.ingress.hosts={a}",
    "router.service.type=NodePort",
)


@pytest.mark.parametrize(
    ("values", "warned"),
    [
        (("metrics.podMonitor.enabled=true",), ["metrics.podMonitor: "]),
        (WAYS_IN, ["router.ingress, router.service.type: "]),
        ((*WAYS_IN, "networkPolicy.clients[0].ipBlock.cidr=10.0.0.0/8"), []),
        ((*WAYS_IN, "metrics.podMonitor.enabled=true", "networkPolicy.enabled=false"), []),
        ((), []),
    ],
)
def test_the_notes_name_what_the_network_policies_keep_out(
    values: tuple[str, ...], warned: list[str]
) -> None:
    flags = [f"--set={value}" for value in values]
    done = run_helm(HELM_4, "install", "--dry-run=client", RELEASE, str(CHART), *flags)
    said = [line for line in done.stdout.splitlines() if " lets nobody in from there" in line]
    assert [line.partition(": ")[0] + ": " for line in said] == warned, done.stderr


@pytest.mark.parametrize("helm", HELMS)
def test_an_image_as_a_volume_needs_a_version_that_has_them(helm: Release) -> None:
    values = "--set=model.image.reference=registry.example/llama:1"
    with pytest.raises(RuntimeError, match=r"since 1\.31"):
        template(helm, [], values, "--kube-version=1.30.0")
    text = template(helm, [], values, "--kube-version=1.31.0")
    assert text.count("reference: registry.example/llama:1") == 3
