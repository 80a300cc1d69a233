"""``make manifests``: the chart's schema and dashboard, its manifests by helm 4."""

from pathlib import Path

from tests.deploy.helm import HELM_4, template
from tests.unit.deploy import dashboard
from tests.unit.deploy.chart import (
    ALL_VALUES,
    CHART,
    DIGEST,
    RENDERED,
    chart_digest,
    json_text,
)
from tests.unit.deploy.values_schema import values_schema


def render(name: str) -> str:
    """One rendering, without the lines at ends that differ between versions of helm."""
    lines = template(HELM_4, ALL_VALUES[name]).splitlines()
    return "\n".join(line for line in lines if line.strip()) + "\n"


def main() -> None:
    """Write the schema, the renderings, and of what chart they were made."""
    (CHART / "values.schema.json").write_text(json_text(values_schema()))
    dashboard.PATH.parent.mkdir(exist_ok=True)
    dashboard.PATH.write_text(dashboard.dashboard_text())
    RENDERED.mkdir(exist_ok=True)
    for name in ALL_VALUES:
        Path(RENDERED / f"{name}.yaml").write_text(render(name))
    DIGEST.write_text(f"{chart_digest()}\n")


if __name__ == "__main__":
    main()
