"""Settings of the router. Built once at start, see :mod:`diptych.settings`."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from diptych.address import LAST_PORT
from diptych.process import ProcessConfig
from diptych.service_level import ObjectiveMs
from diptych.tenant import MAX_LIMIT
from diptych.text.response.families import AnswerForm
from diptych.timers import GrpcSeconds
from router.client_settings import (
    ClassesSettings,
    JwtSettings,
    Objectives,
    PublicTls,
    QuotaSettings,
)
from router.discovery_settings import Addresses, DnsSource, FileSource, KubernetesSource, Source
from router.untaken import DEFAULT_BYTES

_MOST_REQUESTS = 10**8  # gRPC's options have 31 bits, and some are sums of these
_MOST_BYTES = 2**30  # half as much again is still below gRPC's 2 GiB
_MOST_PROCESSES = 64
_MOST_AT_ONCE = 16  # requests of one call: enough to fill steps, and not the queue


def _listed(ports: range) -> str:
    return str(ports[0]) if len(ports) == 1 else f"{ports[0]} to {ports[-1]}"


_SOURCES: Mapping[str, Source] = {
    "file": FileSource(),
    "dns": DnsSource(),
    "kubernetes": KubernetesSource(),
}


class RouterConfig(ProcessConfig):
    """Routes requests to prefill and decode workers."""

    role: ClassVar[str] = "router"

    model: str = Field(
        min_length=1,
        description="Hugging Face folder, .gguf file, hub id, or demo: its tokenizer is used.",
    )
    served_model_name: str | None = Field(
        None,
        description="Name clients use for the model; workers have none, they are known by their "
        "weights' digest. Unset: the source's own name.",
    )
    answer_form: AnswerForm = Field(
        AnswerForm.AUTO,
        description="How a chat's answer says reasoning and calls of tools: a family of models; "
        "auto: as the checkpoint declares, or as its chat template looks like; none: all is text.",
    )
    control_tokens: Literal["parsed-unless-keyed", "parsed", "inert"] = Field(
        "parsed-unless-keyed",
        description="What control tokens (<|im_end|>) are that stand in contents of chats: parsed, "
        "as other servers do, or plain text, so that no content ends its turn. Where clients have "
        "keys they are plain text, unless parsed.",
    )
    cache_dir: Path | None = Field(
        None, description="Where models are imported and downloaded to. Unset: the user's cache."
    )
    discovery: Literal["static", "file", "dns", "kubernetes"] = Field(
        "static",
        description="Where workers are found: the lists --prefill and --decode, a file, DNS, or "
        "Kubernetes' EndpointSlices.",
    )
    prefill: Addresses = Field([], description="static: host:port of each prefill worker.")
    decode: Addresses = Field(
        [], description="static: host:port of each decode worker; at least one."
    )
    file: FileSource = FileSource()
    dns: DnsSource = DnsSource()
    kubernetes: KubernetesSource = KubernetesSource()

    http: bool = Field(
        True, description="Serve the OpenAI-compatible HTTP API beside gRPC, on the same host."
    )
    http_port: int = Field(
        8000, ge=0, le=LAST_PORT, description="Port of the HTTP API; 0 picks one."
    )
    http_metrics: bool = Field(
        True,
        description="Tell the metrics on the HTTP API's port too, to all who reach it; not those "
        "of single tenants.",
    )
    max_tenant_series: int = Field(
        100,
        ge=0,
        le=10_000,
        description="Tenants that the metrics port tells of one by one: the first that ask. Those "
        "who come later are told as one, other. 0: none is told of.",
    )
    cluster_view: Literal["unless-keyed", "always", "never"] = Field(
        "unless-keyed",
        description="Whether clients are told how the pools are (GET /v1/cluster, the page, "
        "diptych top). These are sums over all tenants, so where clients have keys they are not, "
        "unless always.",
    )
    processes: int = Field(
        1,
        ge=1,
        le=_MOST_PROCESSES,
        description="Processes that share the ports, each a router of its own, with limits of its "
        "own. Of more than one, process i has metrics_port + i and health_port + i, and the HTTP "
        "port tells no metrics.",
    )
    shares_ports: bool = Field(
        False,
        description="Take connections at ports that other processes, which say so too, listen at "
        "as well; set by --processes.",
    )
    beats_to: int | None = Field(
        None,
        ge=3,
        description="File descriptor of a pipe to which a byte is written each "
        "timers.heartbeat_s, for a parent that ends a process that hangs; set by --processes.",
    )
    public_tls: PublicTls = PublicTls()
    api_keys: Path | None = Field(
        None,
        description="File of the keys that clients have to send (authorization: Bearer KEY): a "
        "line for each, its tenant and SHA-256, as diptych key makes it. A change counts two "
        "seconds later. Without this and jwt.issuer anybody may call.",
    )
    jwt: JwtSettings = JwtSettings()
    quota: QuotaSettings = QuotaSettings()
    classes: ClassesSettings = ClassesSettings()
    max_queue: int = Field(
        256,
        ge=0,
        le=_MOST_REQUESTS,
        description="Requests that may wait for a placement; more are refused.",
    )
    max_concurrent: int = Field(
        256,
        ge=1,
        le=_MOST_REQUESTS,
        description="Requests that may be on workers at a time; more wait.",
    )
    max_connection_age_s: GrpcSeconds = Field(
        30.0,
        description="A client's connection is ended after this, 10 % more or less, so that clients "
        "spread over routers that came later and leave one that ends, s. Its calls go on.",
    )
    max_connection_grace_s: GrpcSeconds = Field(
        3600.0, description="Calls of a connection that was ended are cut off after this, s."
    )
    max_pending_prefill_tokens: int = Field(
        16384,
        ge=1,
        le=MAX_LIMIT,
        description="Prompt tokens this router lets wait on one prefill worker that has not "
        "measured yet how fast it computes; more wait here.",
    )
    prefill_runway_s: float = Field(
        2.0,
        gt=0,
        description="The same of one that has, in seconds of its computing, s: as much as keeps it "
        "busy with full steps. One prompt of each tenant and class may be "
        "beyond it, as workers take them in turns.",
    )
    placement: Literal["auto", "least-loaded", "predicted"] = Field(
        "auto",
        description="How workers are chosen: by the fewest tokens of work, or by the least "
        "predicted loss: objectives missed, then everybody's seconds. auto: the latter for "
        "requests that have an objective, of their own or as the settings say, else the former.",
    )
    ttft_objective_ms: ObjectiveMs | None = Field(
        None,
        description="Time to first token, from a request's arrival on, that placement by "
        "prediction aims at where neither the request nor its class says it, ms. Unset: the "
        "shorter the better.",
    )
    tpot_objective_ms: ObjectiveMs | None = Field(
        None,
        description="Mean time between tokens that placement by prediction aims at where neither "
        "the request nor its class says it, ms. Unset: the shorter the better.",
    )
    refuse_unreachable: bool = Field(
        True,
        description="With placement by prediction, a request that is foretold to miss its "
        "objectives is refused at once, or waits while a later start may keep them; otherwise it "
        "goes last. Nothing is refused until the workers know their steps.",
    )
    max_attempts: int = Field(
        3, ge=1, description="Attempts of one request, the first included. Refusals do not count."
    )
    local_prefill_below_tokens: int = Field(
        64,
        ge=0,
        description="A decode worker computes a prompt itself when fewer tokens than this are not "
        "in its cache; 0 never.",
    )
    allow_local_prefill: bool = Field(
        True,
        description="Decode workers may compute prompts when no prefill worker is alive. Always so "
        "without any configured.",
    )
    allow_recompute: bool = Field(
        True, description="Decode workers may compute what a failed hand-off did not bring."
    )
    prefix_memory_blocks: int = Field(
        65536,
        ge=0,
        description="Blocks of each worker's prefix cache that placement knows of at the most, 130 "
        "bytes each; what a worker has beyond is taken not to be there.",
    )
    max_request_bytes: int = Field(
        4 * 2**20,
        ge=1,
        le=_MOST_BYTES,
        description="Requests of more bytes are refused without being read.",
    )
    max_open_bytes: int = Field(
        64 * 2**20,
        ge=1,
        description="Bytes of all requests that are open, of each what it has beyond 64 KiB; what "
        "would be more is refused. A tenant may have as many as it leaves free. No less than "
        "max_request_bytes.",
    )
    max_untaken_bytes: int = Field(
        DEFAULT_BYTES,
        ge=2**16,
        description="Bytes of answers that wait for clients to take them, of all together. From a "
        "quarter of it on clients lose theirs that take less than 64 KiB in 15 s, who "
        "holds most for longest first; beyond it others too. Single messages over gRPC have as "
        "much of their own, beyond which requests for one are refused.",
    )
    trace_caller_per_s: float = Field(
        10.0,
        ge=0,
        description="Requests traced a second because their client asks for it; of those beyond, "
        "the share trace_sample_ratio.",
    )
    trace_slow_s: float | None = Field(
        5.0,
        ge=0,
        description="A request that waited this long for a token, the first or another, is traced "
        "whatever was sampled, as is one that failed or was tried again, s. Unset: none is.",
    )
    stream_interval: int = Field(
        1,
        ge=1,
        description="Tokens of one answer that are sent together: later ones wait until there are "
        "so many, or its end; the first waits for none. More cost less of the router's time.",
    )
    client_buffer_messages: int = Field(
        1024,
        ge=1,
        description="Unsent responses kept for one client; when full its request is cancelled.",
    )

    @model_validator(mode="after")
    def _check_discovery(self) -> Self:
        """Only the source that is chosen has settings, and it has what it needs."""
        if self.discovery != "static":
            for pool in ("prefill", "decode"):
                if getattr(self, pool):
                    raise ValueError(self._not_chosen(pool, "static"))
        for name, default in _SOURCES.items():
            source: Source = getattr(self, name)
            if name == self.discovery:
                source.check(name)
            elif source != default:
                given = next(iter(source.model_dump(exclude_defaults=True)))
                raise ValueError(self._not_chosen(f"{name}.{given}", name))
        return self

    @model_validator(mode="after")
    def _check_ports(self) -> Self:
        """Each process has its own where there are several, and no port is wanted twice."""
        ranges = self._port_ranges()
        for flag, ports in ranges.items():
            if len(ports) > 1 and ports[-1] > LAST_PORT:
                raise ValueError(
                    f"--{flag}: {ports[0]} leaves no ports behind it for {self.processes} processes"
                )
        for (flag, ports), (other, others) in itertools.combinations(ranges.items(), 2):
            if ports[0] <= others[-1] and others[0] <= ports[-1]:
                raise ValueError(
                    f"--{flag}: takes {_listed(ports)}, but --{other} takes {_listed(others)}"
                )
        return self

    @model_validator(mode="after")
    def _check_bytes(self) -> Self:
        """A request that is not too large is let in where it is the only one."""
        if self.max_open_bytes < self.max_request_bytes:
            raise ValueError(
                f"--max-open-bytes: {self.max_open_bytes} are no room for one request of "
                f"--max-request-bytes, {self.max_request_bytes}"
            )
        return self

    def _port_ranges(self) -> Mapping[str, range]:
        """By its flag, what each port setting takes; those that the system picks are not there."""
        _, _, listen = self.listen.rpartition(":")
        firsts = {
            "metrics-port": (self.metrics_port, self.processes),
            "health-port": (self.health_port, self.processes),
            "http-port": (self.http_port if self.http else None, 1),
            "listen": (int(listen) if listen.isdecimal() else None, 1),
        }
        return {flag: range(port, port + many) for flag, (port, many) in firsts.items() if port}

    @property
    def has_tenants(self) -> bool:
        """Whether clients have to say who they are."""
        return self.api_keys is not None or self.jwt.issuer is not None

    @property
    def has_inert_contents(self) -> bool:
        """Whether control tokens in contents of chats are plain text."""
        if self.control_tokens == "parsed-unless-keyed":
            return self.has_tenants
        return self.control_tokens == "inert"

    @property
    def num_at_once(self) -> int:
        """Requests of one call that are under way together; all but one of them can wait."""
        return min(_MOST_AT_ONCE, 1 + self.max_queue)

    @property
    def refuses_unreachable(self) -> bool:
        """Whether requests are refused by what is foretold of them."""
        return self.refuse_unreachable and self.placement != "least-loaded"

    @property
    def puts_hopeless_last(self) -> bool:
        """Whether requests that miss their objectives in any case go after the others."""
        return self.placement != "least-loaded" and not self.refuse_unreachable

    @property
    def objectives(self) -> Objectives:
        """Of requests whose class has none of its own."""
        return Objectives(self.ttft_objective_ms, self.tpot_objective_ms)

    def _not_chosen(self, setting: str, source: str) -> str:
        flag = setting.replace("_", "-")
        return f"--{flag}: belongs to --discovery {source}, but that is {self.discovery}"
