"""The metric families that roles share, so that their names and definitions are one.

Each class owns its metrics in one registry; the role's code calls them from the
event-loop thread.
"""

from collections.abc import Callable, Iterable

from diptych.telemetry import attributes
from diptych.telemetry.metrics import Metrics, Sample
from diptych.telemetry.stages import REQUEST_STAGES, Stage

_TOKEN_SECONDS_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5,
)  # fmt: skip
_BYTES_BUCKETS = tuple(4.0**i for i in range(6, 16))


def _label(attribute: str) -> str:
    return attribute.replace(".", "_")


_GEN_AI_LABELS = tuple(
    map(_label, (attributes.OPERATION_NAME, attributes.PROVIDER_NAME, attributes.REQUEST_MODEL))
)


class RequestMetrics:
    """What a router measures of every request. ``outcomes`` bounds the outcome label.

    Those named ``gen_ai_`` are OpenTelemetry's GenAI server metrics. Their labels are its
    attributes (operation, provider, model; of the duration the error too), bounded by who
    observes.
    """

    def __init__(self, metrics: Metrics, outcomes: Iterable[str], kv_paths: Iterable[str]) -> None:
        self.requests = metrics.counters(
            "requests_total",
            "Requests that ended, by outcome: ok, cancelled, or the error's reason.",
            "outcome",
            outcomes,
        )
        self.kv_paths = metrics.counters(
            "requests_by_kv_path_total",
            "Requests that ended ok, by how the KV came to be where it was needed.",
            "kv_path",
            kv_paths,
        )
        self.stage_seconds = metrics.histograms(
            "request_stage_seconds",
            "Time of a request in each stage, s. queue + prefill + first_write = time to first "
            "token; transfer and transfer_exposed lie inside the others.",
            "stage",
            [*REQUEST_STAGES, Stage.TRANSFER, Stage.TRANSFER_EXPOSED],
        )
        self.ttft_seconds = metrics.labelled_histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "TTFT: the router received the request until the first token was written, s.",
            _GEN_AI_LABELS,
        )
        self.tpot_seconds = metrics.labelled_histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "TPOT: (last - first token time) / (output tokens - 1), one per request, s; without "
            "tokens that the client had from an earlier call.",
            _GEN_AI_LABELS,
            _TOKEN_SECONDS_BUCKETS,
        )
        self.itl_seconds = metrics.loop_histogram(
            "inter_token_latency_seconds",
            "ITL: each gap between consecutive tokens of a request, as the router wrote them, s.",
            _TOKEN_SECONDS_BUCKETS,
        )
        self.emission_seconds = metrics.loop_histogram(
            "inter_token_emission_seconds",
            "Each gap between consecutive tokens of a request, as workers sent them to the router: "
            "unlike ITL no client can slow it, s.",
            _TOKEN_SECONDS_BUCKETS,
        )
        self.handoff_gap_seconds = metrics.histogram(
            "handoff_gap_seconds",
            "First until second token of a request, s: where an exposed transfer shows.",
            _TOKEN_SECONDS_BUCKETS,
        )
        self.duration_seconds = metrics.labelled_histogram(
            "gen_ai_server_request_duration_seconds",
            "The router received the request until it ended, s, refused ones too; error_type is "
            "the reason it failed for, empty where it did not.",
            (*_GEN_AI_LABELS, _label(attributes.ERROR_TYPE)),
        )
        self.input_tokens = metrics.counter("input_tokens_total", "Prompt tokens of requests.")
        self.output_tokens = metrics.counter("output_tokens_total", "Tokens sent to clients.")
        self.cached_tokens = metrics.counter(
            "cached_tokens_total", "Prompt tokens whose KV no worker had to compute."
        )
        self.retries = metrics.counters(
            "retries_total",
            "What followed a failed attempt: rebind, prefill_again or recompute, or fail, where a "
            "hand-off failed and nothing was left to try.",
            "action",
            ("rebind", "prefill_again", "recompute", "fail"),
        )


class EngineMetrics:
    """What a worker tells of its engine; block counts are read at each scrape."""

    def __init__(
        self,
        metrics: Metrics,
        blocks: Callable[[], Iterable[tuple[str, int]]],
        num_running: Callable[[], int],
        num_waiting: Callable[[], int],
    ) -> None:
        def samples() -> Iterable[Sample]:
            return [((owner,), float(count)) for owner, count in blocks() if owner != "total"]

        metrics.read_gauges(
            "kv_blocks",
            "KV blocks by owner, each counted once by the precedence quarantined > leased > "
            "reserved > running > cached > free; they sum to the pool.",
            ("owner",),
            samples,
        )
        metrics.read_gauge("sequences_running", "Sequences in the running batch.", num_running)
        metrics.read_gauge("sequences_waiting", "Sequences waiting for a place.", num_waiting)
        self.steps = metrics.counter("engine_steps_total", "Model steps completed.")
        self.step_seconds = metrics.histogram(
            "engine_step_seconds", "Time of one model step, s.", _TOKEN_SECONDS_BUCKETS
        )
        self.computed_tokens = metrics.counters(
            "engine_tokens_total",
            "Tokens computed, by phase: prefill (chunks of prompts) or decode.",
            "phase",
            ("prefill", "decode"),
        )
        self.preemptions = metrics.counter(
            "preemptions_total", "Times a sequence's blocks were taken and recomputed later."
        )
        self.yielded = metrics.counters(
            "sequences_yielded_total",
            "Times a batch's sequence left for others: its blocks (of preemptions_total), its "
            "place in the batch alone, or a step in which they got a token and it none.",
            "what",
            ("blocks", "place", "step"),
        )
        self.prefix_hit_tokens = metrics.counter(
            "prefix_cache_hit_tokens_total", "Prompt tokens found in this worker's prefix cache."
        )
        self.prefix_lookup_tokens = metrics.counter(
            "prefix_cache_lookup_tokens_total", "Prompt tokens looked up in the prefix cache."
        )
        self.local_prefills = metrics.counters(
            "local_prefills_total",
            "Sequences whose KV a decode worker computed itself, by why.",
            "why",
            ("local", "recompute"),
        )


class TransferMetrics:
    """What a decode worker measures of its pulls."""

    def __init__(
        self, metrics: Metrics, transports: Iterable[str], failures: Iterable[str]
    ) -> None:
        self.pulls = metrics.counters(
            "kv_pulls_total", "Pulls that were proven, by transport.", "transport", transports
        )
        self.failed_pulls = metrics.counters(
            "kv_pulls_failed_total",
            "Pulls that ended without proof, by reason.",
            "reason",
            failures,
        )
        self.bytes = metrics.counter("kv_transfer_bytes_total", "KV bytes of proven pulls.")
        self.pull_bytes = metrics.histogram(
            "kv_pull_bytes", "KV bytes of one proven pull.", _BYTES_BUCKETS
        )
        self.pull_seconds = metrics.histogram(
            "kv_pull_seconds", "Bind until proven, s.", _TOKEN_SECONDS_BUCKETS
        )
        self.read_seconds = metrics.histogram(
            "kv_read_seconds",
            "Time of a pull in which at least one read was under way, s.",
            _TOKEN_SECONDS_BUCKETS,
        )
        self.exposed_seconds = metrics.histogram(
            "kv_exposed_seconds",
            "The last range announced until proven, s: what prefill could not hide.",
            _TOKEN_SECONDS_BUCKETS,
        )


class LeaseMetrics:
    """What a prefill worker measures of its leases."""

    def __init__(self, metrics: Metrics, num_open: Callable[[], int]) -> None:
        metrics.read_gauge("leases_open", "Leases whose stream is open.", num_open)
        self.ended = metrics.counters(
            "leases_ended_total",
            "Leases that ended, by why.",
            "why",
            ("released", "cancelled", "expired", "lost_router", "failed", "drained"),
        )
        self.held_seconds = metrics.histogram(
            "lease_held_seconds", "Accepted until the blocks were freed, s."
        )
