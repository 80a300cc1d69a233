"""The cluster for one machine: what it tells the program is understood, and it fits together."""

import re
from typing import Any

import pytest
import yaml

from decode_worker.config import DecodeWorkerConfig
from diptych import settings
from diptych.cli.commands import COMMANDS
from diptych.cli.health import HealthConfig
from diptych.process import ProcessConfig
from prefill_worker.config import PrefillWorkerConfig
from router.config import RouterConfig
from tests.unit.deploy.chart import ROOT

DEPLOY = ROOT / "deploy"
CONFIGS: dict[str, type[ProcessConfig]] = {
    "router": RouterConfig,
    "prefill": PrefillWorkerConfig,
    "decode": DecodeWorkerConfig,
}


def services() -> dict[str, Any]:
    return dict(yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"])


def config_of(role: str) -> ProcessConfig:
    command, *args = services()[role]["command"]
    assert command == role
    prefix = f"DIPTYCH_{role.upper()}_"
    return settings.load(CONFIGS[role], args, prog=f"diptych {role}", env_prefix=prefix)


@pytest.mark.parametrize("role", CONFIGS)
def test_the_program_takes_its_settings(role: str) -> None:
    config = config_of(role)
    assert config.otlp_endpoint == "http://jaeger:4317"
    assert config.listen == "0.0.0.0:50051"
    # Where the image's health command asks.
    assert HealthConfig().address == "127.0.0.1:50051"


def test_the_router_knows_the_workers() -> None:
    config = config_of("router")
    assert isinstance(config, RouterConfig)
    assert (config.prefill, config.decode) == (["prefill:50051"], ["decode:50051"])


def test_every_process_is_scraped() -> None:
    text = (DEPLOY / "compose" / "prometheus.yaml").read_text()
    scraped = {
        job["static_configs"][0]["targets"][0] for job in yaml.safe_load(text)["scrape_configs"]
    }
    assert scraped == {f"{role}:{config_of(role).metrics_port}" for role in CONFIGS}


def test_data_sources_are_there() -> None:
    text = (DEPLOY / "compose" / "datasources.yaml").read_text()
    hosts = {
        source["url"].split("/")[2].split(":")[0] for source in yaml.safe_load(text)["datasources"]
    }
    assert hosts == {"prometheus", "jaeger"} <= set(services())


def test_nothing_listens_beyond_this_machine() -> None:
    for name, service in services().items():
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), name
        for volume in service.get("volumes", []):
            if volume.startswith("./"):
                assert (DEPLOY / volume.split(":")[0]).exists(), name


def test_our_processes_have_no_rights_and_time_to_drain() -> None:
    for role in CONFIGS:
        service, timers = services()[role], config_of(role).timers
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert float(service["stop_grace_period"].removesuffix("s")) >= timers.drain_s + 10


def test_images_have_versions() -> None:
    for name, service in services().items():
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"]), name


def test_the_image_has_all_packages_and_a_command_that_exists() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    project = (ROOT / "pyproject.toml").read_text()
    (packages,) = re.findall(r"^packages = \[(.*)\]$", project, re.MULTILINE)
    for package in re.findall(r'"(\w+)"', packages):
        assert f"\nCOPY {package} {package}\n" in text
        assert f"\n!{package}\n" in (ROOT / ".dockerignore").read_text()
    (health,) = re.findall(r'HEALTHCHECK .* CMD \["diptych", "(\w+)"\]', text)
    assert health in {command.name for command in COMMANDS}
    assert re.search(r"^USER 10001:10001$", text, re.MULTILINE)
