"""Names of span attributes; as labels of ``gen_ai_`` metrics they have ``_`` for each dot.

Those of OpenTelemetry's GenAI conventions where they exist, ``diptych.`` ones
elsewhere. Never prompts, outputs, or tickets.
"""

from typing import Final

OPERATION_NAME: Final = "gen_ai.operation.name"  # chat or text_completion
PROVIDER_NAME: Final = "gen_ai.provider.name"
PROVIDER: Final = "diptych"  # the value that it always has
REQUEST_MODEL: Final = "gen_ai.request.model"
REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
REQUEST_TOP_K: Final = "gen_ai.request.top_k"
REQUEST_TOP_P: Final = "gen_ai.request.top_p"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
TIME_TO_FIRST_TOKEN: Final = "gen_ai.server.time_to_first_token"  # s
ERROR_TYPE: Final = "error.type"  # the reason, such as KV_BLOCKS_EXHAUSTED

REQUEST_ID: Final = "diptych.request_id"
OUTCOME: Final = "diptych.outcome"  # ok, cancelled, or the error's reason
STAGE: Final = "diptych.stage"
ATTEMPT: Final = "diptych.attempt"
KV_PATH: Final = "diptych.kv_path"
FALLBACK: Final = "diptych.fallback"
REQUEST_CLASS: Final = "diptych.class"  # realtime, standard or batch
WAITED_FOR: Final = "diptych.queue.waited_for"  # room, turn or objectives: the last of these
REFUSED_BECAUSE: Final = "diptych.queue.refused_because"  # what was foretold
FORETOLD_TTFT: Final = "diptych.foretold.time_to_first_token"  # s, from its placement on
FORETOLD_TPOT: Final = "diptych.foretold.time_per_output_token"  # s
FORETOLD_CANDIDATES: Final = "diptych.foretold.candidates"  # of predicted, the best first
HANDOFF_GAP: Final = "diptych.handoff_gap"  # s
PREFILL_WORKER: Final = "diptych.prefill_worker"
DECODE_WORKER: Final = "diptych.decode_worker"
TRANSPORT: Final = "diptych.transfer.transport"
TRANSFER_BYTES: Final = "diptych.transfer.bytes"
TRANSFER_TOKENS: Final = "diptych.transfer.tokens"
TRANSFER_REUSED_TOKENS: Final = "diptych.transfer.reused_tokens"  # were there: not pulled
TRANSFER_GB_PER_S: Final = "diptych.transfer.gigabytes_per_s"  # 10^9 bytes, while reads ran
TRANSFER_READ_S: Final = "diptych.transfer.read_s"
TRANSFER_EXPOSED_S: Final = "diptych.transfer.exposed_s"
NUM_PREEMPTIONS: Final = "diptych.num_preemptions"
COMPUTED_TOKENS: Final = "diptych.computed_tokens"
# Why an attempt's workers were chosen: lines of text, the chosen one first.
PLACEMENT: Final = "diptych.placement"  # paired, prefill_only, or why a prompt is computed locally
PREFILL_CANDIDATES: Final = "diptych.placement.prefill_candidates"
NUM_PREFILL_CANDIDATES: Final = "diptych.placement.num_prefill_candidates"  # not all are listed
DECODE_CANDIDATES: Final = "diptych.placement.decode_candidates"
NUM_DECODE_CANDIDATES: Final = "diptych.placement.num_decode_candidates"

# Of a worker, behind the attribute that names it.
CLOCK_OFFSET_S: Final = "clock_offset_s"  # how far its clock is ahead of the router's
CLOCK_UNCERTAINTY_S: Final = "clock_uncertainty_s"  # the truth lies within, on either side
