"""Settings of where the router finds workers: of each source."""

import re
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from diptych import settings
from diptych.address import is_address

_SERVICE = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")


def check_addresses(value: list[str]) -> list[str]:
    """Each is host:port, and there once. Raises ValueError."""
    for address in value:
        if not is_address(address):
            raise ValueError(f"expected host:port, found {address!r}")
    if len(set(value)) != len(value):
        raise ValueError("an address is listed twice")
    return value


def _check_names(value: list[str]) -> list[str]:
    for name in value:
        if ":" in name if name.startswith("_") else not is_address(name):
            raise ValueError(f"expected name:port, or _port._tcp.name, found {name!r}")
    if len(set(value)) != len(value):
        raise ValueError("a name is listed twice")
    return value


def _check_services(value: list[str]) -> list[str]:
    for service in value:
        if not _SERVICE.fullmatch(service):
            raise ValueError(f"expected the name of a service, found {service!r}")
    if len(set(value)) != len(value):
        raise ValueError("a service is listed twice")
    return value


def _check_server(value: str | None) -> str | None:
    if value is not None:
        try:
            ip_address(value.rpartition(":")[0].strip("[]"))
        except ValueError:
            raise ValueError("expected ip:port") from None
        if not is_address(value):
            raise ValueError("expected ip:port")
    return value


Addresses = Annotated[list[str], settings.ADDRESSES, AfterValidator(check_addresses)]
"""Of workers, as host:port, each once."""

MaxWorkers = Annotated[
    int,
    Field(
        ge=1,
        description="Workers of each pool that are taken of those it names: of more, those that "
        "were taken before come first.",
    ),
]

Services = Annotated[list[str], AfterValidator(_check_services)]
"""Names of Kubernetes services, each once."""

DnsNames = Annotated[list[str], AfterValidator(_check_names)]
"""``name:port`` or ``_port._tcp.name``, each once."""


class Source(BaseModel):
    """Settings of one way to find workers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    needs: ClassVar[str]  # what must be given where this is chosen

    def check(self, name: str) -> None:
        """Raises ValueError: what ``--discovery name`` needs is missing."""
        if not getattr(self, self.needs):
            raise ValueError(f"--{name}.{self.needs}: is required by --discovery {name}")


class FileSource(Source):
    """Of ``--discovery file``."""

    needs: ClassVar[str] = "path"

    path: Path | None = Field(
        None, description="YAML or JSON file of workers: lists of host:port, prefill and decode."
    )
    interval_s: float = Field(1.0, gt=0, description="Time between two looks at the file, s.")


class DnsSource(Source):
    """Of ``--discovery dns``."""

    needs: ClassVar[str] = "decode"

    prefill: DnsNames = Field([], description="As decode, of the prefill workers.")
    decode: DnsNames = Field(
        [],
        description="name:port, asked for A records (else AAAA), or _port._tcp.name, asked for SRV "
        "records, of the decode workers, such as a headless service's.",
    )
    interval_s: float = Field(5.0, gt=0, description="Time between two times of asking, s.")
    server: Annotated[str | None, AfterValidator(_check_server)] = Field(
        None, description="ip:port of the DNS server to ask. Unset: the system's."
    )
    max_workers: MaxWorkers = 1024


class KubernetesSource(Source):
    """Of ``--discovery kubernetes``."""

    needs: ClassVar[str] = "decode"

    prefill: Services = Field([], description="As decode, of the prefill workers.")
    decode: Services = Field([], description="Service of the decode workers, by its name.")
    namespace: str | None = Field(
        None, description="Namespace of the services. Unset: the router's own, or the kubeconfig's."
    )
    port: str = Field("grpc", description="Name of the services' port; one without a name will do.")
    relist_s: float = Field(
        60.0, gt=0, description="All endpoints are listed anew each time this has passed, s."
    )
    kubeconfig: Path | None = Field(
        None,
        description="Where the API is and who asks. Unset: as the pod's service account, else "
        "KUBECONFIG.",
    )
    max_workers: MaxWorkers = 1024
