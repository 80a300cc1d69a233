"""What tests of the router share."""

import pytest

from diptych.text.tokenizer import Tokenizer
from tests.text_models import byte_level_tokenizer, write_folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return write_folder(tmp_path_factory.mktemp("byte-level"), byte_level_tokenizer())
