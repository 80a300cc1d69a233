"""What a router wants to be told of a sequence's tokens, checked. Pure."""

from diptych.engine.scheduling.report import LogprobsReport, Pooling, PoolingReport, Report
from diptych.errors import InvalidRequestError
from diptych.sampling_params import MAX_LOGPROBS
from diptych.v1 import prefill_pb2


def read_report(command: prefill_pb2.PrefillStart) -> Report | None:
    """None: nothing but the KV is wanted. Raises InvalidRequestError."""
    match command.report.WhichOneof("kind"):
        case "logprobs":
            return _logprobs(command.report.logprobs, len(command.spec.token_ids))
        case "pooling":
            return _pooling(command.report.pooling)
    if command.HasField("report"):
        raise InvalidRequestError("is of a kind that is not known here", field="report.kind")
    return None


def _pooling(asked: prefill_pb2.PoolingReport) -> PoolingReport:
    try:
        return PoolingReport(Pooling(asked.pooling))
    except ValueError:
        raise InvalidRequestError("is not known here", field="report.pooling.pooling") from None


def _logprobs(asked: prefill_pb2.LogprobsReport, num_tokens: int) -> LogprobsReport:
    first, end = asked.first_position, asked.end_position
    if not 1 <= first <= end <= num_tokens:
        raise InvalidRequestError(
            f"{first} to {end} is not within 1 and {num_tokens}",
            field="report.logprobs.first_position",
        )
    if asked.num_top > MAX_LOGPROBS:
        raise InvalidRequestError(
            f"{asked.num_top} is more than {MAX_LOGPROBS}", field="report.logprobs.num_top"
        )
    return LogprobsReport(first, end, asked.num_top)
