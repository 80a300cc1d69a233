"""Shows where one answer's time and its KV went. Pure: usage and timing in, lines out."""

from collections.abc import Iterator

from diptych.v1 import inference_pb2

_KV_PATHS = {
    inference_pb2.KV_PATH_DISAGGREGATED: "prefilled on {p}, KV pulled, decoded on {d}",
    inference_pb2.KV_PATH_LOCAL: "prefilled and decoded on {d}",
    inference_pb2.KV_PATH_RECOMPUTED: "the hand-off failed: computed again on {d}",
    inference_pb2.KV_PATH_PREFILL_ONLY: "prefilled on {p}, nothing left to decode",
}


def breakdown(usage: inference_pb2.Usage, timing: inference_pb2.Timing) -> list[str]:
    """The stages of an answer, a line each. queue + prefill + first write = TTFT."""
    num_output = usage.num_output_tokens
    lines = [
        _stage("queue", timing.queue_s),
        _stage("prefill", timing.prefill_s, _prompt(usage)),
        _stage("first write", timing.first_write_s),
        _stage("TTFT", timing.ttft_s, "queue + prefill + first write"),
    ]
    lines += _transfer(timing)
    if num_output > 1:
        lines.append(_stage("hand-off gap", timing.handoff_gap_s, "first to second token"))
    if num_output > 2 and timing.decode_s > 0:
        itl_s = timing.decode_s / (num_output - 2)
        rate = (num_output - 1) / (timing.handoff_gap_s + timing.decode_s)
        note = f"{num_output} tokens, ITL {1e3 * itl_s:.1f} ms, {rate:.1f} tokens/s"
        lines.append(_stage("decode", timing.decode_s, note))
    lines.append(_stage("total", timing.total_s, kv_path(timing)))
    return lines


def kv_path(timing: inference_pb2.Timing) -> str:
    """Where the answer was computed, and how its KV came there."""
    return ", ".join(_path(timing))


def kv_was_handed_off(timing: inference_pb2.Timing) -> bool:
    """Whether a decode worker pulled KV of the prompt, and says that it computed none itself."""
    pulled = timing.kv_path == inference_pb2.KV_PATH_DISAGGREGATED and timing.transfer.num_bytes > 0
    says = timing.HasField("num_computed_prompt_tokens")
    return pulled and says and timing.num_computed_prompt_tokens == 0


def _stage(name: str, seconds: float, note: str = "") -> str:
    return f"{name:<13}{1e3 * seconds:>9.1f} ms  {note}".rstrip()


def _prompt(usage: inference_pb2.Usage) -> str:
    cached = f", {usage.num_cached_tokens} of them cached" if usage.num_cached_tokens else ""
    return f"{usage.num_prompt_tokens} tokens{cached}"


def _transfer(timing: inference_pb2.Timing) -> list[str]:
    if not timing.HasField("transfer"):
        return []
    stats = timing.transfer
    rate = f" at {stats.num_bytes / stats.read_s / 1e9:.2f} GB/s" if stats.read_s > 0 else ""
    note = (
        f"{stats.num_bytes / 1e6:.2f} MB{rate} over {stats.transport}, "
        f"{1e3 * stats.exposed_s:.1f} ms not hidden by prefill"
    )
    return [_stage("transfer", stats.total_s, note)]


def _path(timing: inference_pb2.Timing) -> Iterator[str]:
    text = _KV_PATHS.get(timing.kv_path)
    if text is not None:
        yield text.format(p=timing.prefill_worker, d=timing.decode_worker)
    if timing.num_attempts > 1:
        yield f"{timing.num_attempts} attempts"
    if timing.num_preemptions:
        yield f"{timing.num_preemptions} preemptions"
    if timing.HasField("num_computed_prompt_tokens"):
        yield f"prompt tokens computed on the decode worker: {timing.num_computed_prompt_tokens}"
