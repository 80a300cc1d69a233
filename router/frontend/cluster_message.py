"""The report of the cluster as a message. Pure."""

from dataclasses import asdict

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
    return inference_pb2.RecentLatency(**asdict(latency))


def _worker(worker: WorkerReport) -> inference_pb2.WorkerView:
    told = asdict(worker)
    return inference_pb2.WorkerView(**{**told, "blocks": inference_pb2.BlockView(**told["blocks"])})


def _pair(pair: PairReport) -> inference_pb2.PairView:
    return inference_pb2.PairView(**asdict(pair))
