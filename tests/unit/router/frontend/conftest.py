"""What tests of the front door share."""

from pathlib import Path

import pytest

from diptych.text.tokenizer import Tokenizer
from tests.text_models import byte_level_tokenizer, write_folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("byte-level")
    return write_folder(folder, byte_level_tokenizer())
