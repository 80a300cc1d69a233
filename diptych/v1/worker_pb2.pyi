from diptych.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_ROLE_UNSPECIFIED: _ClassVar[WorkerRole]
    WORKER_ROLE_PREFILL: _ClassVar[WorkerRole]
    WORKER_ROLE_DECODE: _ClassVar[WorkerRole]

class ServingState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVING_STATE_UNSPECIFIED: _ClassVar[ServingState]
    SERVING_STATE_STARTING: _ClassVar[ServingState]
    SERVING_STATE_READY: _ClassVar[ServingState]
    SERVING_STATE_DRAINING: _ClassVar[ServingState]
    SERVING_STATE_FAILED: _ClassVar[ServingState]

class PairState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAIR_STATE_UNSPECIFIED: _ClassVar[PairState]
    PAIR_STATE_CONNECTING: _ClassVar[PairState]
    PAIR_STATE_PROVEN: _ClassVar[PairState]
    PAIR_STATE_FAILED: _ClassVar[PairState]
WORKER_ROLE_UNSPECIFIED: WorkerRole
WORKER_ROLE_PREFILL: WorkerRole
WORKER_ROLE_DECODE: WorkerRole
SERVING_STATE_UNSPECIFIED: ServingState
SERVING_STATE_STARTING: ServingState
SERVING_STATE_READY: ServingState
SERVING_STATE_DRAINING: ServingState
SERVING_STATE_FAILED: ServingState
PAIR_STATE_UNSPECIFIED: PairState
PAIR_STATE_CONNECTING: PairState
PAIR_STATE_PROVEN: PairState
PAIR_STATE_FAILED: PairState

class SetRolesRequest(_message.Message):
    __slots__ = ("roles",)
    ROLES_FIELD_NUMBER: _ClassVar[int]
    roles: _containers.RepeatedScalarFieldContainer[WorkerRole]
    def __init__(self, roles: _Optional[_Iterable[_Union[WorkerRole, str]]] = ...) -> None: ...

class SetRolesResponse(_message.Message):
    __slots__ = ("before", "roles", "num_unfinished")
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    NUM_UNFINISHED_FIELD_NUMBER: _ClassVar[int]
    before: _containers.RepeatedScalarFieldContainer[WorkerRole]
    roles: _containers.RepeatedScalarFieldContainer[WorkerRole]
    num_unfinished: int
    def __init__(self, before: _Optional[_Iterable[_Union[WorkerRole, str]]] = ..., roles: _Optional[_Iterable[_Union[WorkerRole, str]]] = ..., num_unfinished: _Optional[int] = ...) -> None: ...

class EndTracesRequest(_message.Message):
    __slots__ = ("keep", "drop")
    KEEP_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    keep: _containers.RepeatedScalarFieldContainer[int]
    drop: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, keep: _Optional[_Iterable[int]] = ..., drop: _Optional[_Iterable[int]] = ...) -> None: ...

class EndTracesResponse(_message.Message):
    __slots__ = ("time_s",)
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    time_s: float
    def __init__(self, time_s: _Optional[float] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("router_incarnation",)
    ROUTER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    router_incarnation: str
    def __init__(self, router_incarnation: _Optional[str] = ...) -> None: ...

class WorkerState(_message.Message):
    __slots__ = ("incarnation", "role", "state", "message", "layout", "max_model_len", "progress", "blocks", "num_running", "num_waiting", "num_pending_prefill_tokens", "prefill_tokens_per_s", "decode_step_s", "pairs", "local_prefill", "vocab_size", "faults_allowed", "max_num_seqs", "text_digest", "pairs_version", "step_model", "max_batched_tokens", "num_pending_attention_pairs", "num_decoding", "num_context_tokens", "zone", "nvlink_domain", "roles", "able_roles", "prefill_time_ratio", "num_giving_way", "num_giving_way_blocks", "prefill_age_s", "num_reserved", "num_paced", "tightest_paced")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_PENDING_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_S_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    FAULTS_ALLOWED_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    TEXT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PAIRS_VERSION_FIELD_NUMBER: _ClassVar[int]
    STEP_MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PENDING_ATTENTION_PAIRS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODING_FIELD_NUMBER: _ClassVar[int]
    NUM_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    NVLINK_DOMAIN_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    ABLE_ROLES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TIME_RATIO_FIELD_NUMBER: _ClassVar[int]
    NUM_GIVING_WAY_FIELD_NUMBER: _ClassVar[int]
    NUM_GIVING_WAY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_AGE_S_FIELD_NUMBER: _ClassVar[int]
    NUM_RESERVED_FIELD_NUMBER: _ClassVar[int]
    NUM_PACED_FIELD_NUMBER: _ClassVar[int]
    TIGHTEST_PACED_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    role: WorkerRole
    state: ServingState
    message: str
    layout: _common_pb2.KVLayout
    max_model_len: int
    progress: _common_pb2.EngineProgress
    blocks: BlockCounts
    num_running: int
    num_waiting: int
    num_pending_prefill_tokens: int
    prefill_tokens_per_s: float
    decode_step_s: float
    pairs: _containers.RepeatedCompositeFieldContainer[Pair]
    local_prefill: bool
    vocab_size: int
    faults_allowed: bool
    max_num_seqs: int
    text_digest: str
    pairs_version: int
    step_model: StepModel
    max_batched_tokens: int
    num_pending_attention_pairs: int
    num_decoding: int
    num_context_tokens: int
    zone: str
    nvlink_domain: str
    roles: _containers.RepeatedScalarFieldContainer[WorkerRole]
    able_roles: _containers.RepeatedScalarFieldContainer[WorkerRole]
    prefill_time_ratio: float
    num_giving_way: int
    num_giving_way_blocks: int
    prefill_age_s: float
    num_reserved: int
    num_paced: int
    tightest_paced: _containers.RepeatedCompositeFieldContainer[PacedSequence]
    def __init__(self, incarnation: _Optional[str] = ..., role: _Optional[_Union[WorkerRole, str]] = ..., state: _Optional[_Union[ServingState, str]] = ..., message: _Optional[str] = ..., layout: _Optional[_Union[_common_pb2.KVLayout, _Mapping]] = ..., max_model_len: _Optional[int] = ..., progress: _Optional[_Union[_common_pb2.EngineProgress, _Mapping]] = ..., blocks: _Optional[_Union[BlockCounts, _Mapping]] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_pending_prefill_tokens: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., decode_step_s: _Optional[float] = ..., pairs: _Optional[_Iterable[_Union[Pair, _Mapping]]] = ..., local_prefill: _Optional[bool] = ..., vocab_size: _Optional[int] = ..., faults_allowed: _Optional[bool] = ..., max_num_seqs: _Optional[int] = ..., text_digest: _Optional[str] = ..., pairs_version: _Optional[int] = ..., step_model: _Optional[_Union[StepModel, _Mapping]] = ..., max_batched_tokens: _Optional[int] = ..., num_pending_attention_pairs: _Optional[int] = ..., num_decoding: _Optional[int] = ..., num_context_tokens: _Optional[int] = ..., zone: _Optional[str] = ..., nvlink_domain: _Optional[str] = ..., roles: _Optional[_Iterable[_Union[WorkerRole, str]]] = ..., able_roles: _Optional[_Iterable[_Union[WorkerRole, str]]] = ..., prefill_time_ratio: _Optional[float] = ..., num_giving_way: _Optional[int] = ..., num_giving_way_blocks: _Optional[int] = ..., prefill_age_s: _Optional[float] = ..., num_reserved: _Optional[int] = ..., num_paced: _Optional[int] = ..., tightest_paced: _Optional[_Iterable[_Union[PacedSequence, _Mapping]]] = ...) -> None: ...

class PacedSequence(_message.Message):
    __slots__ = ("tpot_s", "decoding_s", "num_drawn", "num_more", "owner", "sequence_id")
    TPOT_S_FIELD_NUMBER: _ClassVar[int]
    DECODING_S_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAWN_FIELD_NUMBER: _ClassVar[int]
    NUM_MORE_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    tpot_s: float
    decoding_s: float
    num_drawn: int
    num_more: int
    owner: str
    sequence_id: int
    def __init__(self, tpot_s: _Optional[float] = ..., decoding_s: _Optional[float] = ..., num_drawn: _Optional[int] = ..., num_more: _Optional[int] = ..., owner: _Optional[str] = ..., sequence_id: _Optional[int] = ...) -> None: ...

class StepModel(_message.Message):
    __slots__ = ("decode", "prefill")
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    decode: StepCost
    prefill: StepCost
    def __init__(self, decode: _Optional[_Union[StepCost, _Mapping]] = ..., prefill: _Optional[_Union[StepCost, _Mapping]] = ...) -> None: ...

class StepCost(_message.Message):
    __slots__ = ("fixed_s", "row_s", "context_token_s", "prefill_token_s", "attention_pair_s", "upper_ratio", "num_steps", "more_row_s", "num_trials")
    FIXED_S_FIELD_NUMBER: _ClassVar[int]
    ROW_S_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_PAIR_S_FIELD_NUMBER: _ClassVar[int]
    UPPER_RATIO_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    MORE_ROW_S_FIELD_NUMBER: _ClassVar[int]
    NUM_TRIALS_FIELD_NUMBER: _ClassVar[int]
    fixed_s: float
    row_s: float
    context_token_s: float
    prefill_token_s: float
    attention_pair_s: float
    upper_ratio: float
    num_steps: int
    more_row_s: _containers.RepeatedScalarFieldContainer[float]
    num_trials: int
    def __init__(self, fixed_s: _Optional[float] = ..., row_s: _Optional[float] = ..., context_token_s: _Optional[float] = ..., prefill_token_s: _Optional[float] = ..., attention_pair_s: _Optional[float] = ..., upper_ratio: _Optional[float] = ..., num_steps: _Optional[int] = ..., more_row_s: _Optional[_Iterable[float]] = ..., num_trials: _Optional[int] = ...) -> None: ...

class BlockCounts(_message.Message):
    __slots__ = ("total", "free", "cached", "running", "reserved", "leased", "quarantined")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    total: int
    free: int
    cached: int
    running: int
    reserved: int
    leased: int
    quarantined: int
    def __init__(self, total: _Optional[int] = ..., free: _Optional[int] = ..., cached: _Optional[int] = ..., running: _Optional[int] = ..., reserved: _Optional[int] = ..., leased: _Optional[int] = ..., quarantined: _Optional[int] = ...) -> None: ...

class Pair(_message.Message):
    __slots__ = ("source_address", "source_incarnation", "state", "transport", "bytes_per_s", "message", "transfer", "way")
    SOURCE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    WAY_FIELD_NUMBER: _ClassVar[int]
    source_address: str
    source_incarnation: str
    state: PairState
    transport: str
    bytes_per_s: float
    message: str
    transfer: TransferCost
    way: str
    def __init__(self, source_address: _Optional[str] = ..., source_incarnation: _Optional[str] = ..., state: _Optional[_Union[PairState, str]] = ..., transport: _Optional[str] = ..., bytes_per_s: _Optional[float] = ..., message: _Optional[str] = ..., transfer: _Optional[_Union[TransferCost, _Mapping]] = ..., way: _Optional[str] = ...) -> None: ...

class TransferCost(_message.Message):
    __slots__ = ("fixed_s", "byte_s", "upper_ratio", "num_pulls")
    FIXED_S_FIELD_NUMBER: _ClassVar[int]
    BYTE_S_FIELD_NUMBER: _ClassVar[int]
    UPPER_RATIO_FIELD_NUMBER: _ClassVar[int]
    NUM_PULLS_FIELD_NUMBER: _ClassVar[int]
    fixed_s: float
    byte_s: float
    upper_ratio: float
    num_pulls: int
    def __init__(self, fixed_s: _Optional[float] = ..., byte_s: _Optional[float] = ..., upper_ratio: _Optional[float] = ..., num_pulls: _Optional[int] = ...) -> None: ...
