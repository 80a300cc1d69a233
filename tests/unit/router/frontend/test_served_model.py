"""What a model's makers recommend applies where a client says nothing, and is logged."""

import json
import logging
from pathlib import Path

import pytest

from diptych.sampling_params import SamplingOptions
from router.frontend.served_model import ServedModel
from tests.tiny_model import write_tiny_model


def test_detail_16_defaults_of_the_models_makers_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_tiny_model(tmp_path)
    said = {"eos_token_id": [2], "temperature": 0.25, "top_k": 7, "typical_p": 0.9}
    (folder / "generation_config.json").write_text(json.dumps(said))
    with caplog.at_level(logging.INFO):
        model = ServedModel.from_folder("m", folder)
    assert model.recommended == SamplingOptions(temperature=0.25, top_k=7)
    (record,) = [each for each in caplog.records if "sampling defaults" in each.getMessage()]
    assert vars(record)["defaults"] == {"temperature": 0.25, "top_k": 7}
    assert list(vars(record)["not_served"]) == ["typical_p"]


@pytest.mark.parametrize(
    ("said", "is_told"),
    [
        ({"eos_token_id": [2]}, False),
        ({"temperature": 0.5}, True),
        ({"typical_p": 0.9}, True),
    ],
)
def test_detail_16_only_what_changes_an_answer_or_would_elsewhere_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, said: dict[str, object], is_told: bool
) -> None:
    folder = write_tiny_model(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps(said))
    with caplog.at_level(logging.INFO):
        ServedModel.from_folder("m", folder)
    assert any("sampling defaults" in each.getMessage() for each in caplog.records) == is_told


@pytest.mark.parametrize(
    ("text_config", "size"),
    [(None, 64), ({}, 64), ({"hidden_size": 8}, 8), ({"vocab_size": 9}, 64)],
)
def test_what_a_text_part_leaves_out_is_that_of_all(
    tmp_path: Path, text_config: object, size: int
) -> None:
    folder = write_tiny_model(tmp_path)
    path = folder / "config.json"
    said = json.loads(path.read_text()) | {"hidden_size": 64, "text_config": text_config}
    path.write_text(json.dumps(said))
    assert ServedModel.from_folder("m", folder).vector_size == size
