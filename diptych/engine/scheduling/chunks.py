"""A sequence's part of a plan: a copy of what the model thread needs of it. Pure."""

from array import array

from diptych.engine.scheduling.block_tables import BlockTables
from diptych.engine.scheduling.sequence import Sequence
from diptych.engine.scheduling.step import Chunk, History, SampleSpec


def next_chunk(seq: Sequence, end: int, tables: BlockTables) -> Chunk:
    """Its tokens without KV up to ``end``; all of them: a token is drawn after them."""
    start = seq.num_computed_tokens
    return Chunk(
        token_ids=tuple(seq.token_ids[start:end]),
        start=start,
        block_table=tables.packed(seq),
        sample=_sample(seq) if end == seq.num_tokens else None,
        report=seq.report and seq.report.part(seq.token_ids, start, end),
    )


def _sample(seq: Sequence) -> SampleSpec:
    params = seq.sampling
    return SampleSpec(
        params=params,
        allow_stop=seq.num_output_tokens >= params.min_tokens,
        history=_history(seq) if params.needs_history else None,
        key=None if params.constraint is None else seq.key,
    )


def _history(seq: Sequence) -> History:
    """Token ids pass through Python once each; a step copies them as one piece of memory."""
    packed = seq.packed_tokens
    if packed is None:
        packed = seq.packed_tokens = array("q")
    packed.extend(seq.token_ids[len(packed) :])
    return History(packed[:], seq.num_prompt_tokens)
