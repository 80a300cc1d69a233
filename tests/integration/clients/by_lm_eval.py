"""Scores of one small task by lm-eval: of a server's completions, or of transformers.

Runs in an environment of its own (``make clients-long``), beside which nothing of ours is imported.
Prints one JSON object: the task's figures, and of each question the log probabilities.
"""

import json
import sys

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager


def main(kind: str, model_args: str, task_folder: str, task: str) -> None:
    """``kind`` and ``model_args`` as lm-eval names them."""
    made = simple_evaluate(
        model=kind,
        model_args=model_args,
        tasks=[task],
        task_manager=TaskManager(include_path=task_folder, include_defaults=False),
        batch_size=1,
        log_samples=True,
        bootstrap_iters=0,
    )
    figures = {
        name: value
        for name, value in made["results"][task].items()
        if isinstance(value, float) and "stderr" not in name
    }
    samples = sorted(made["samples"][task], key=lambda sample: sample["doc_id"])
    told = [[float(found[0][0]) for found in sample["resps"]] for sample in samples]
    print(json.dumps({"figures": figures, "logprobs": told}))  # noqa: T201 - its output


if __name__ == "__main__":
    main(*sys.argv[1:])
