"""Our BPE with merges from scores against ``sentencepiece`` itself, on models it trained."""

import importlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer

from diptych.errors import ConfigurationError
from diptych.models.gguf_import.gguf_file import GGUFFile
from diptych.models.gguf_import.sentencepiece import build_tokenizer
from diptych.models.gguf_import.vocabulary import read_vocabulary
from tests.text_models import SAMPLES

# Llama 2 puts a space before every text; Gemma does not and has tokens of its own.
_LLAMA_2 = {"add_dummy_prefix": True}
_GEMMA = {"add_dummy_prefix": False, "user_defined_symbols": ["\n", "\n\n", "▁▁", "▁▁▁", "<tag>"]}


class Pair(NamedTuple):
    ours: HFTokenizer
    theirs: sentencepiece.SentencePieceProcessor


@pytest.fixture(scope="module", params=[_LLAMA_2, _GEMMA], ids=["llama-2", "gemma"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    model = train(request.param)
    path = tmp_path_factory.mktemp("sentencepiece") / "m.gguf"
    write_vocabulary(model, path, request.param["add_dummy_prefix"])
    with GGUFFile(path) as file:
        ours = build_tokenizer(file, read_vocabulary(file))
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(model)
    return Pair(ours, processor)


def train(options: dict[str, Any]) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=_sentences(),
        model_writer=model,
        model_type="bpe",
        vocab_size=600,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        **options,
    )
    return model.getvalue()


def _sentences() -> Iterator[str]:
    for sample in SAMPLES:
        for word in sample.split():
            yield f"{word} {word[::-1]}  {word}{word}"
        yield from sample.splitlines()


def write_vocabulary(model: bytes, path: Path, add_space_prefix: bool) -> None:
    """What llama.cpp's converter makes of it."""
    protos: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    proto = protos.ModelProto.FromString(model)
    writer = gguf.GGUFWriter(path, "llama")
    user_defined = 4
    writer.add_token_list(
        [
            piece.piece.replace("▁", " ") if piece.type == user_defined else piece.piece
            for piece in proto.pieces
        ]
    )
    writer.add_token_scores([piece.score for piece in proto.pieces])
    writer.add_token_types([piece.type for piece in proto.pieces])
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(add_space_prefix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


texts = st.one_of(
    st.text(max_size=40),
    st.text("abehlo ▁\n\t1<tag>漢😀ß", max_size=60),
    st.lists(st.sampled_from(" ".join(SAMPLES).split(" ")), max_size=8).map(" ".join),
)


@given(text=texts)
def test_the_same_tokens(pair: Pair, text: str) -> None:
    if "\0" in text:  # ends a text for sentencepiece
        text = text.replace("\0", "")
    for special in ("<s>", "</s>", "<unk>"):  # we parse these, it does not
        text = text.replace(special, "")
    ids = pair.ours.encode(text, add_special_tokens=False).ids
    assert ids == pair.theirs.encode(text)
    assert pair.ours.decode(ids) == pair.theirs.decode(ids)


def test_normalisation_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_token_list(["<unk>", "a"])
    writer.add_token_scores([0.0, 0.0])
    writer.add_remove_extra_whitespaces(True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with (
        GGUFFile(tmp_path / "m.gguf") as file,
        pytest.raises(ConfigurationError, match="remove_extra_whitespaces"),
    ):
        build_tokenizer(file, read_vocabulary(file))
