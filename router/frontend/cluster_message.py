"""The report of the cluster as a message. Pure."""

from diptych.v1 import inference_pb2
from router.generation.cluster_report import (
    ClusterReport,
    LatencyReport,
    PairReport,
    WorkerReport,
)


def write_report(report: ClusterReport) -> inference_pb2.DescribeClusterResponse:
    """See inference.proto."""
    return inference_pb2.DescribeClusterResponse(
        model=report.model,
        num_waiting=report.num_waiting,
        num_placed=report.num_placed,
        num_output_tokens=report.num_output_tokens,
        ttft=_latency(report.ttft),
        itl=_latency(report.itl),
        num_prefill=report.num_prefill,
        num_decode=report.num_decode,
        num_pairs=report.num_pairs,
        prefill=map(_worker, report.prefill),
        decode=map(_worker, report.decode),
        pairs=map(_pair, report.pairs),
    )


def _latency(latency: LatencyReport) -> inference_pb2.RecentLatency:
    return inference_pb2.RecentLatency(
        num_samples=latency.num_samples, p50_s=latency.p50_s, p95_s=latency.p95_s
    )


def _worker(worker: WorkerReport) -> inference_pb2.WorkerView:
    blocks = worker.blocks
    return inference_pb2.WorkerView(
        address=worker.address,
        state=worker.state,
        message=worker.message,
        is_used=worker.is_used,
        blocks=inference_pb2.BlockView(
            total=blocks.total,
            free=blocks.free,
            cached=blocks.cached,
            running=blocks.running,
            reserved=blocks.reserved,
            leased=blocks.leased,
            quarantined=blocks.quarantined,
        ),
        num_running=worker.num_running,
        num_waiting=worker.num_waiting,
        max_num_seqs=worker.max_num_seqs,
        num_pending_prefill_tokens=worker.num_pending_prefill_tokens,
        prefill_tokens_per_s=worker.prefill_tokens_per_s,
        decode_step_s=worker.decode_step_s,
    )


def _pair(pair: PairReport) -> inference_pb2.PairView:
    return inference_pb2.PairView(
        prefill=pair.prefill,
        decode=pair.decode,
        state=pair.state,
        transport=pair.transport,
        bytes_per_s=pair.bytes_per_s,
        num_pulls=pair.num_pulls,
        way=pair.way,
    )
