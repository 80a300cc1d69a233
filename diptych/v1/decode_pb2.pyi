from diptych.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PullFailure(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PULL_FAILURE_UNSPECIFIED: _ClassVar[PullFailure]
    PULL_FAILURE_SOURCE_LOST: _ClassVar[PullFailure]
    PULL_FAILURE_TICKET_INVALID: _ClassVar[PullFailure]
    PULL_FAILURE_TRANSPORT: _ClassVar[PullFailure]
    PULL_FAILURE_UNPROVEN: _ClassVar[PullFailure]
    PULL_FAILURE_LAYOUT: _ClassVar[PullFailure]
    PULL_FAILURE_NOT_CONNECTED: _ClassVar[PullFailure]
PULL_FAILURE_UNSPECIFIED: PullFailure
PULL_FAILURE_SOURCE_LOST: PullFailure
PULL_FAILURE_TICKET_INVALID: PullFailure
PULL_FAILURE_TRANSPORT: PullFailure
PULL_FAILURE_UNPROVEN: PullFailure
PULL_FAILURE_LAYOUT: PullFailure
PULL_FAILURE_NOT_CONNECTED: PullFailure

class DecodeCommand(_message.Message):
    __slots__ = ("hello", "peers", "reserve", "bind", "start", "release", "heartbeat")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    BIND_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    peers: Peers
    reserve: Reserve
    bind: Bind
    start: Start
    release: Release
    heartbeat: _common_pb2.Heartbeat
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., peers: _Optional[_Union[Peers, _Mapping]] = ..., reserve: _Optional[_Union[Reserve, _Mapping]] = ..., bind: _Optional[_Union[Bind, _Mapping]] = ..., start: _Optional[_Union[Start, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., heartbeat: _Optional[_Union[_common_pb2.Heartbeat, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("router_incarnation",)
    ROUTER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    router_incarnation: str
    def __init__(self, router_incarnation: _Optional[str] = ...) -> None: ...

class Peers(_message.Message):
    __slots__ = ("peers",)
    PEERS_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    def __init__(self, peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("address", "incarnation")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    address: str
    incarnation: str
    def __init__(self, address: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class Reserve(_message.Message):
    __slots__ = ("sequence_id", "request_id", "spec", "trace_context", "to_pull")
    class TraceContextEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    TRACE_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    TO_PULL_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    request_id: str
    spec: _common_pb2.SequenceSpec
    trace_context: _containers.ScalarMap[str, str]
    to_pull: bool
    def __init__(self, sequence_id: _Optional[int] = ..., request_id: _Optional[str] = ..., spec: _Optional[_Union[_common_pb2.SequenceSpec, _Mapping]] = ..., trace_context: _Optional[_Mapping[str, str]] = ..., to_pull: _Optional[bool] = ...) -> None: ...

class Bind(_message.Message):
    __slots__ = ("sequence_id", "bind_id", "source_address", "source_incarnation", "ticket", "first_missing_token", "trace_context")
    class TraceContextEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    BIND_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    FIRST_MISSING_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TRACE_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    bind_id: int
    source_address: str
    source_incarnation: str
    ticket: bytes
    first_missing_token: int
    trace_context: _containers.ScalarMap[str, str]
    def __init__(self, sequence_id: _Optional[int] = ..., bind_id: _Optional[int] = ..., source_address: _Optional[str] = ..., source_incarnation: _Optional[str] = ..., ticket: _Optional[bytes] = ..., first_missing_token: _Optional[int] = ..., trace_context: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("sequence_id", "emitted_token_ids", "compute_missing", "trace_context", "emitted_age_s")
    class TraceContextEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    EMITTED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_MISSING_FIELD_NUMBER: _ClassVar[int]
    TRACE_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    EMITTED_AGE_S_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    emitted_token_ids: _containers.RepeatedScalarFieldContainer[int]
    compute_missing: bool
    trace_context: _containers.ScalarMap[str, str]
    emitted_age_s: float
    def __init__(self, sequence_id: _Optional[int] = ..., emitted_token_ids: _Optional[_Iterable[int]] = ..., compute_missing: _Optional[bool] = ..., trace_context: _Optional[_Mapping[str, str]] = ..., emitted_age_s: _Optional[float] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("sequence_id",)
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    def __init__(self, sequence_id: _Optional[int] = ...) -> None: ...

class DecodeEvent(_message.Message):
    __slots__ = ("welcome", "reserved", "proven", "pull_failed", "step", "ended", "heartbeat")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    PROVEN_FIELD_NUMBER: _ClassVar[int]
    PULL_FAILED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    reserved: Reserved
    proven: Proven
    pull_failed: PullFailed
    step: StepTokens
    ended: Ended
    heartbeat: _common_pb2.Heartbeat
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., reserved: _Optional[_Union[Reserved, _Mapping]] = ..., proven: _Optional[_Union[Proven, _Mapping]] = ..., pull_failed: _Optional[_Union[PullFailed, _Mapping]] = ..., step: _Optional[_Union[StepTokens, _Mapping]] = ..., ended: _Optional[_Union[Ended, _Mapping]] = ..., heartbeat: _Optional[_Union[_common_pb2.Heartbeat, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("incarnation",)
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    def __init__(self, incarnation: _Optional[str] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("sequence_id", "num_cached_tokens")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    num_cached_tokens: int
    def __init__(self, sequence_id: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...

class Proven(_message.Message):
    __slots__ = ("sequence_id", "bind_id", "stats")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    BIND_ID_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    bind_id: int
    stats: _common_pb2.TransferStats
    def __init__(self, sequence_id: _Optional[int] = ..., bind_id: _Optional[int] = ..., stats: _Optional[_Union[_common_pb2.TransferStats, _Mapping]] = ...) -> None: ...

class PullFailed(_message.Message):
    __slots__ = ("sequence_id", "bind_id", "reason", "message")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    BIND_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    bind_id: int
    reason: PullFailure
    message: str
    def __init__(self, sequence_id: _Optional[int] = ..., bind_id: _Optional[int] = ..., reason: _Optional[_Union[PullFailure, str]] = ..., message: _Optional[str] = ...) -> None: ...

class StepTokens(_message.Message):
    __slots__ = ("sequences",)
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceTokens]
    def __init__(self, sequences: _Optional[_Iterable[_Union[SequenceTokens, _Mapping]]] = ...) -> None: ...

class SequenceTokens(_message.Message):
    __slots__ = ("sequence_id", "position", "token_ids", "margins", "logprobs")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MARGINS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    margins: _containers.RepeatedScalarFieldContainer[float]
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    def __init__(self, sequence_id: _Optional[int] = ..., position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., margins: _Optional[_Iterable[float]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class Ended(_message.Message):
    __slots__ = ("sequence_id", "finish_reason", "failure", "num_preemptions", "num_computed_tokens", "num_computed_prompt_tokens")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    finish_reason: _common_pb2.FinishReason
    failure: _common_pb2.Failure
    num_preemptions: int
    num_computed_tokens: int
    num_computed_prompt_tokens: int
    def __init__(self, sequence_id: _Optional[int] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., failure: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ..., num_preemptions: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., num_computed_prompt_tokens: _Optional[int] = ...) -> None: ...
