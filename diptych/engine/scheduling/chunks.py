"""A sequence's part of a plan: a copy of what the model thread needs of it. Pure."""

from array import array
from collections.abc import Mapping

from diptych.engine.scheduling.block_tables import BlockTables
from diptych.engine.scheduling.sequence import Sequence
from diptych.engine.scheduling.step import UNKNOWN, Chunk, History, SampleSpec


def next_chunk(
    seq: Sequence, end: int, tables: BlockTables, drawn_by: Mapping[Sequence, int]
) -> Chunk:
    """Its tokens behind those in flight up to ``end``; all of them: a token is drawn after them.

    They are in flight from here on. drawn_by: the chunks of the step before, where that has not
    ended yet.
    """
    start = seq.num_computed_tokens + seq.num_in_flight_tokens
    is_unknown = seq.num_unknown_tokens > 0
    sample = _sample(seq) if end == seq.num_planned_tokens else None
    seq.num_in_flight_tokens = end - seq.num_computed_tokens
    if sample is not None:
        seq.num_unknown_tokens += 1
    return Chunk(
        token_ids=UNKNOWN if is_unknown else tuple(seq.token_ids[start:end]),
        start=start,
        block_table=tables.packed(seq),
        sample=sample,
        report=seq.report and seq.report.part(seq.token_ids, start, end),
        follows=drawn_by[seq] if is_unknown else None,
    )


def _sample(seq: Sequence) -> SampleSpec:
    params = seq.sampling
    num_output = seq.num_output_tokens + seq.num_unknown_tokens
    return SampleSpec(
        params=params,
        allow_stop=num_output >= params.min_tokens,
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
