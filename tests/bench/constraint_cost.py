"""What constraints cost each token: steps of a batch with and without them, in turns.

``python -m tests.bench.constraint_cost --model demo``. Every sequence has its own schema and
is within a text, where nearly all tokens fit, which is where masks are largest.
"""

import argparse
import json
import statistics
from array import array
from dataclasses import replace

from diptych.constraint import OutputGrammar
from diptych.engine.scheduling.sequence import SequenceKey
from diptych.engine.scheduling.step import Chunk, History, SampleSpec, StepPlan
from diptych.models import source
from diptych.progress import silent
from diptych.sampling_params import SamplingParams
from diptych.text.grammar_check import write_grammar
from diptych.text.tokenizer import Tokenizer
from tests.bench.engine_rig import Rig, loaded, model_thread
from tests.bench.limits import Workload, worker_config

BATCH, CONTEXT, MAX_STEPS = 16, 512, 60


def constrained(plan: StepPlan, tokenizer: Tokenizer, num_steps: int) -> list[StepPlan]:
    """The plan's rows, each one token further in its own output from plan to plan."""
    ends = tokenizer.eos_token_ids
    text = tokenizer.encode(' "x' + " and a river" * num_steps, add_special=False)
    grammars = [
        write_grammar("json_schema", [json.dumps(_schema(row))]) for row in range(len(plan.chunks))
    ]
    begins = [tokenizer.encode(f'{{"k{row}":', add_special=False) for row in range(len(grammars))]

    def chunk(row: int, step: int) -> Chunk:
        output = [*begins[row], *text[: 3 + step]]
        params = SamplingParams(
            temperature=0.0,
            max_tokens=2**20,
            stop_token_ids=ends,
            constraint=OutputGrammar(grammars[row], ends),
        )
        history = History(array("q", [5] * (CONTEXT - len(output)) + output), CONTEXT - len(output))
        key = SequenceKey("bench", row)
        spec = SampleSpec(params=params, allow_stop=True, history=history, key=key)
        return replace(plan.chunks[row], sample=spec)

    return [
        StepPlan(chunks=tuple(chunk(row, step) for row in range(len(plan.chunks))))
        for step in range(num_steps)
    ]


def _schema(row: int) -> dict[str, object]:
    return {"type": "object", "properties": {f"k{row}": {"type": "string"}}}


def measure(rig: Rig, tokenizer: Tokenizer, num_steps: int) -> tuple[float, float]:
    """Medians, s: of a step without constraints, and of what they add (each beside its own)."""
    free = rig.decode_plan(BATCH, CONTEXT)
    plans = constrained(free, tokenizer, num_steps)
    rig.run(plans[:2])  # compiles
    pairs = [(rig.run([free]), rig.run([plan])) for plan in plans[2:]]
    return statistics.median(f for f, _ in pairs), statistics.median(c - f for f, c in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", default="demo", help="demo, gemma or a folder")
    parser.add_argument("--steps", type=int, default=MAX_STEPS)
    options = parser.parse_args()
    workload = Workload(batches=(BATCH,), contexts=(CONTEXT,), prompts=(), num_rounds=1)
    config = worker_config(options.model, workload, ())
    with model_thread() as thread, loaded(config, thread) as rig:
        folder = source.resolve(config.model, source.DEFAULT_CACHE_DIR, silent).folder
        tokenizer = Tokenizer.from_folder(folder)
        step_s, added_s = measure(rig, tokenizer, options.steps)
    share = added_s / step_s
    print(  # noqa: T201
        f"step {step_s * 1e3:.2f} ms, constraints {added_s * 1e3:.3f} ms: {share:.1%} of ITL at "
        f"batch {BATCH}"
    )


if __name__ == "__main__":
    main()
