"""Wire messages as events, and actions as wire messages: what a machine's shells share. Pure."""

from collections.abc import Mapping
from types import MappingProxyType

from diptych.finish_reason import FinishReason
from diptych.rpc.status import from_failure
from diptych.token_logprobs import TokenLogprobs
from diptych.v1 import common_pb2, decode_pb2, prefill_pb2
from router.generation.answer import Transfer
from router.request import actions, events
from router.request.events import Event
from router.request.prompt_told import Wanted, WantedStates

_NO_TRACE: Mapping[str, str] = MappingProxyType({})
_FINISH_REASONS = frozenset(FinishReason)


def prefill_event(sequence_id: int, message: prefill_pb2.PrefillEvent) -> Event | None:
    """What the worker of that lease says; None: nothing that concerns the request."""
    match message.WhichOneof("event"):
        case "accepted":
            return events.Accepted(sequence_id, message.accepted.num_cached_tokens)
        case "first_token":
            first = message.first_token
            margin = first.margin if first.HasField("margin") else None
            logprobs = (
                TokenLogprobs.from_proto(first.logprobs) if first.HasField("logprobs") else None
            )
            return events.FirstToken(
                sequence_id,
                first.token_id,
                first.position,
                margin,
                _known(first.finish_reason),
                logprobs,
            )
        case "prompt_logprobs":
            return events.PromptTold(sequence_id, message.prompt_logprobs)
        case "pooled":
            return events.PromptTold(sequence_id, message.pooled)
        case "granted":
            return events.Granted(sequence_id, message.granted.grant_id)
        case _:
            return None


def decode_event(message: decode_pb2.DecodeEvent) -> Event | None:
    """What a decode worker says of one sequence; None: nothing that concerns its request."""
    match message.WhichOneof("event"):
        case "reserved":
            reserved = message.reserved
            return events.Reserved(reserved.sequence_id, reserved.num_cached_tokens)
        case "proven":
            proven = message.proven
            return events.Proven(proven.sequence_id, proven.bind_id, proven.stats)
        case "pull_failed":
            failed = message.pull_failed
            return events.PullFailed(
                failed.sequence_id, failed.bind_id, failed.reason, failed.message
            )
        case "ended":
            ended = message.ended
            error = from_failure(ended.failure) if ended.HasField("failure") else None
            has_count = ended.HasField("num_computed_prompt_tokens")
            return events.Ended(
                ended.sequence_id,
                _known(ended.finish_reason),
                ended.num_preemptions,
                error,
                ended.num_computed_prompt_tokens if has_count else None,
            )
        case _:
            return None


def tokens(message: decode_pb2.SequenceTokens) -> events.Tokens:
    """New tokens of one sequence, out of a step's message."""
    logprobs = message.logprobs
    return events.Tokens(
        message.sequence_id,
        message.position,
        message.token_ids[:],  # a list, which is read faster than the message
        message.margins[:],
        tuple(map(TokenLogprobs.from_proto, logprobs)) if logprobs else (),
    )


def _known(finish_reason: int) -> int:
    """One of a newer worker that has no name here is not said: 0."""
    return finish_reason if finish_reason in _FINISH_REASONS else 0


def transfer(stats: common_pb2.TransferStats) -> Transfer:
    """What a proven pull cost, as the client is told."""
    return Transfer(
        transport=stats.transport,
        num_bytes=stats.num_bytes,
        num_tokens=stats.num_tokens,
        read_s=stats.read_s,
        exposed_s=stats.exposed_s,
        total_s=stats.total_s,
        digest_s=stats.digest_s,
    )


def grant(action: actions.Grant) -> prefill_pb2.Grant:
    """The message of that action."""
    return prefill_pb2.Grant(
        grant_id=action.grant_id,
        ticket=action.ticket,
        reader_incarnation=action.reader.incarnation,
    )


def report(wanted: Wanted) -> prefill_pb2.PromptReport:
    """What a lease is to tell of the prompt."""
    if isinstance(wanted, WantedStates):
        pooling = common_pb2.Pooling.Name(wanted.pooling)
        return prefill_pb2.PromptReport(pooling=prefill_pb2.PoolingReport(pooling=pooling))
    return prefill_pb2.PromptReport(logprobs=prefill_pb2.LogprobsReport(**wanted._asdict()))


def bind(action: actions.Bind, trace_context: Mapping[str, str] = _NO_TRACE) -> decode_pb2.Bind:
    """The message of that action, as part of that span."""
    return decode_pb2.Bind(
        sequence_id=action.sequence_id,
        bind_id=action.bind_id,
        source_address=action.source.address,
        source_incarnation=action.source.incarnation,
        ticket=action.ticket,
        first_missing_token=action.first_missing_token,
        trace_context=trace_context,
    )


def start(action: actions.Start, trace_context: Mapping[str, str] = _NO_TRACE) -> decode_pb2.Start:
    """The message of that action, as part of that span."""
    return decode_pb2.Start(
        sequence_id=action.sequence_id,
        emitted_token_ids=action.emitted,
        compute_missing=action.compute_missing,
        emitted_age_s=action.emitted_age_s,
        trace_context=trace_context,
    )
