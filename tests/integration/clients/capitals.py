"""One small task as lm-eval reads it: each capital among five. Pure but for the files."""

import json
from pathlib import Path
from typing import Final

TASK: Final = "capitals"
_CAPITALS: Final = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Germany": "Berlin",
    "Portugal": "Lisbon",
    "Greece": "Athens",
    "Austria": "Vienna",
    "Poland": "Warsaw",
    "Hungary": "Budapest",
    "Ireland": "Dublin",
    "Norway": "Oslo",
    "Sweden": "Stockholm",
    "Finland": "Helsinki",
    "Denmark": "Copenhagen",
    "Russia": "Moscow",
    "Japan": "Tokyo",
    "China": "Beijing",
    "India": "New Delhi",
    "Egypt": "Cairo",
    "Cuba": "Havana",
}
_DESCRIPTION: Final = """\
task: {task}
dataset_path: json
dataset_kwargs:
  data_files: {{"test": "{questions}"}}
test_split: test
output_type: multiple_choice
doc_to_text: "The capital of {{{{country}}}} is"
doc_to_choice: choices
doc_to_target: right
target_delimiter: " "
metric_list:
  - metric: acc
  - metric: acc_norm
"""


def write_task(folder: Path) -> None:
    """The questions and their description, into ``folder``."""
    names = list(_CAPITALS.values())
    questions = folder / "capitals.jsonl"
    with questions.open("w") as lines:
        for index, (country, capital) in enumerate(_CAPITALS.items()):
            others = [names[(index + step) % len(names)] for step in (3, 7, 11, 16)]
            choices = sorted([capital, *others])
            row = {"country": country, "choices": choices, "right": choices.index(capital)}
            lines.write(json.dumps(row) + "\n")
    (folder / "capitals.yaml").write_text(_DESCRIPTION.format(task=TASK, questions=questions))
