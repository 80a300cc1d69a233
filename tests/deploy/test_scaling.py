"""What KEDA is told to ask Prometheus: it grows the pool that is short of room, and no other."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from diptych.worker.config import WorkerConfig
from tests.deploy.helm import HELM_4, template
from tests.deploy.promtool import NoPromtoolError, promtool
from tests.unit.deploy.chart import NAMESPACE, RELEASE, named, parsed

NUM_PLACES = WorkerConfig.model_fields["max_num_seqs"].default
BOTH_ROLES = "settings.roles={prefill,decode}"
SOFT_ALONE = ("prefill.pools.main=null", f"decode.pools.main.{BOTH_ROLES}")
NO_PREFILL = ("prefill.pools.main=null",)


class Trigger(NamedTuple):
    query: str
    kind: str
    threshold: float


def triggers(role: str, *values: str, pool: str = "main") -> list[Trigger]:
    """Those of one pool, with these values."""
    said = ("keda.serverAddress=http://prometheus:9090", f"{role}.keda.enabled=true", *values)
    manifests = parsed(template(HELM_4, [], *(f"--set={value}" for value in said)))
    scaled = named(manifests, "ScaledObject", f"{RELEASE}-diptych-{role}-{pool}")
    return [
        Trigger(t["metadata"]["query"], t["metricType"], float(t["metadata"]["threshold"]))
        for t in scaled["spec"]["triggers"]
    ]


def of(metric: str, asked: list[Trigger]) -> list[Trigger]:
    return [trigger for trigger in asked if trigger.query.startswith(f"sum({metric}{{")]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_pool_grows_before_its_places_are_taken(role: str) -> None:
    (running,) = of("diptych_sequences_running", triggers(role))
    assert running.kind == "AverageValue"
    assert running.threshold == 0.8 * NUM_PLACES
    own = triggers(role, f"{role}.settings.max_num_seqs=256", f"{role}.keda.placeUsage=1")
    assert of("diptych_sequences_running", own)[0].threshold == 256


@pytest.mark.parametrize(
    ("role", "values", "is_asked"),
    [
        ("prefill", (), True),
        ("decode", (), False),
        ("decode", SOFT_ALONE, True),
        ("decode", NO_PREFILL, True),
        ("decode", (*NO_PREFILL, f"decode.pools.soft.{BOTH_ROLES}"), False),
    ],
)
def test_what_waits_in_routers_grows_who_computes_prompts(
    role: str, values: tuple[str, ...], is_asked: bool
) -> None:
    waiting = of("diptych_router_requests_waiting", triggers(role, *values))
    assert [(t.kind, t.threshold) for t in waiting] == ([("AverageValue", 8)] if is_asked else [])


def test_a_share_or_number_of_the_values_own_is_taken() -> None:
    asked = triggers("prefill", "prefill.keda.waitingRequests=3")
    assert of("diptych_router_requests_waiting", asked)[0].threshold == 3


def pod_series(name: str, metric: str, value: str) -> dict[str, str]:
    labels = f'namespace="{NAMESPACE}", pod="{RELEASE}-diptych-{name}"'
    return {"series": f"{metric}{{{labels}}}", "values": value}


def told(router: int, prefill_busy: float, decode_running: int) -> list[dict[str, str]]:
    """What the pods of one router and one worker of each kind tell, each 15 s."""
    step_s = f"0+{15 * prefill_busy}x40"
    return [
        pod_series("router-5d7f9c4b8-x2z4q", "diptych_router_requests_waiting", f"{router}x40"),
        pod_series("prefill-main-0", "diptych_sequences_running", "0x40"),
        pod_series("prefill-main-0", "diptych_engine_step_seconds_sum", step_s),
        pod_series("decode-main-0", "diptych_sequences_running", f"{decode_running}x40"),
        pod_series("other-0", "diptych_router_requests_waiting", "1000x40"),
    ]


def answer(query: str, series: list[dict[str, str]], expected: float, folder: Path) -> None:
    """Prometheus' own evaluation is as expected, after five minutes."""
    try:
        tool = promtool()
    except NoPromtoolError as error:
        pytest.skip(str(error))
    samples = [{"labels": "{}", "value": expected}]
    asked: Mapping[str, Any] = {
        "evaluation_interval": "15s",
        "tests": [
            {
                "interval": "15s",
                "input_series": series,
                "promql_expr_test": [{"expr": query, "eval_time": "5m", "exp_samples": samples}],
            }
        ],
    }
    (folder / "tests.yaml").write_text(json.dumps(asked))
    done = subprocess.run(
        [tool, "test", "rules", "tests.yaml"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_prompts_that_wait_grow_a_prefill_pool_that_computes(tmp_path: Path) -> None:
    """As measured with prompts of 1,500 tokens: 90 waited, one worker computed all the time."""
    (waiting,) = of("diptych_router_requests_waiting", triggers("prefill"))
    answer(waiting.query, told(router=90, prefill_busy=0.97, decode_running=6), 90, tmp_path)


def test_an_idle_prefill_pool_is_not_grown_for_what_waits_for_decode(tmp_path: Path) -> None:
    """As measured with short requests: 136 waited, and no place to decode was free."""
    series = told(router=136, prefill_busy=0.2, decode_running=NUM_PLACES)
    (waiting,) = of("diptych_router_requests_waiting", triggers("prefill"))
    answer(waiting.query, series, 0, tmp_path)
    (running,) = of("diptych_sequences_running", triggers("decode"))
    answer(running.query, series, NUM_PLACES, tmp_path)
    assert running.threshold < NUM_PLACES
