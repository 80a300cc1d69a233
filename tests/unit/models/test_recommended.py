"""What a model's makers recommend is read from its generation_config.json, or refused."""

import json
from pathlib import Path

import pytest

from diptych.errors import ConfigurationError
from diptych.models.demo import _recommend
from diptych.models.recommended import read_recommended
from diptych.sampling_params import NOTHING_SAID, SamplingOptions


def folder_with(folder: Path, content: object) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(content))
    return folder


def test_nothing_is_recommended_without_the_file(tmp_path: Path) -> None:
    assert read_recommended(tmp_path).options == NOTHING_SAID


def test_what_is_served_is_taken_and_what_is_not_is_told(tmp_path: Path) -> None:
    said = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "typical_p": 0.9}
    recommended = read_recommended(folder_with(tmp_path, said))
    assert recommended.options == SamplingOptions(temperature=0.6, top_k=20, top_p=0.95, min_p=0.1)
    assert recommended.ignored == ("typical_p",)


def test_a_whole_number_may_be_written_with_a_point(tmp_path: Path) -> None:
    top_k = read_recommended(folder_with(tmp_path, {"top_k": 20.0})).options.top_k
    assert isinstance(top_k, int)


@pytest.mark.parametrize(
    "content",
    [
        {"temperature": -1},
        {"top_p": 0},
        {"top_k": "many"},
        {"top_k": 2.5},
        {"temperature": True},
        [],
    ],
)
def test_a_value_that_no_client_could_send_stops_the_start(tmp_path: Path, content: object) -> None:
    with pytest.raises(ConfigurationError, match="generation_config"):
        read_recommended(folder_with(tmp_path, content))


def test_the_demo_model_gets_its_makers_values(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {"eos_token_id": [2]})
    _recommend(folder / "generation_config.json")
    assert read_recommended(folder).options == SamplingOptions(temperature=0.2, top_p=0.9)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [2]
