"""The imported real models: transformers loads them, and the tokens are the family's own."""

import importlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tokenizers
from tokenizers import models, pre_tokenizers

from diptych.errors import ConfigurationError
from diptych.models.gguf_import import import_gguf
from diptych.models.gguf_import.gguf_file import GGUFFile
from diptych.models.gguf_import.vocabulary import TokenKind, read_vocabulary
from diptych.progress import silent
from diptych.text.chat_template import Message
from diptych.text.detokenizer import Detokenizer
from diptych.text.tokenizer import Tokenizer
from tests import hf_reference
from tests.golden.models import GEMMA3_GGUF
from tests.golden.reference import load_reference
from tests.text_models import SAMPLES, write_gguf
from tests.tiny_model import write_tiny_model
from tests.torch_threads import torch_threads

MORE_SAMPLES = (
    "for i in range(10):\n\tprint(f'{i:>5}')\n\n\n\t\treturn  x\r\n",
    "Tel. +49 30 901820, 3.14159 and 1e-5, ٣٤٥ Ⅷ x² in 2024-07-26T12:00:00Z",
    "\u2581 is the symbol itself \u2581\u2581, and <table><tr> are tags; <0x0A> is a byte's name",
    "word " * 40 + " " * 37 + "\n" * 35 + "\t" * 33 + "=" * 70 + "-" * 65,
    "\x00\x01\x7f \ufeff \ufffd \U0010ffff \u202e",
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


def random_texts(num_texts: int) -> list[str]:
    """Mixtures of everything, in the same order on every machine."""
    rng = random.Random(7)
    corpus = "".join((*SAMPLES, *MORE_SAMPLES)).replace("<s>", "")
    runs = [" ", "\n", "\t", "a", "ha", ".", "-", "1", "=", "😀", "漢", "▁"]
    texts = []
    for _ in range(num_texts):
        parts = []
        for _ in range(rng.randrange(1, 12)):
            start = rng.randrange(len(corpus))
            parts.append(corpus[start : start + rng.randrange(1, 12)])
            parts.append(rng.choice(runs) * rng.randrange(0, 9))
        texts.append("".join(parts))
    return texts


@pytest.mark.parametrize(
    ("model", "prompt", "continuation"),
    [
        ("smollm2", "The capital of France is", " Paris"),
        ("gemma3", "Monday, Tuesday, Wednesday,", " Thursday, Friday, Saturday"),
    ],
)
def test_transformers_continues_sensibly(
    request: pytest.FixtureRequest, model: str, prompt: str, continuation: str
) -> None:
    folder: Path = request.getfixturevalue(model)
    tokenizer = Tokenizer.from_folder(folder)
    run = hf_reference.greedy(folder, tokenizer.encode(prompt), 8)
    assert tokenizer.decode(run.token_ids).startswith(continuation)


def test_the_committed_reference_still_holds(smollm2: Path) -> None:
    prompt = load_reference("smollm2")[3]
    run = hf_reference.greedy(smollm2, prompt.token_ids, 16)
    assert run.token_ids == prompt.output_ids[:16]


def test_smollm2_splits_every_digit(smollm2: Path) -> None:
    """Against the family's rule, put together from the library's own parts."""
    ours = Tokenizer.from_folder(smollm2)
    content = json.loads((smollm2 / "tokenizer.json").read_text())
    pairs = [(left, right) for left, right in content["model"]["merges"]]
    theirs = tokenizers.Tokenizer(models.BPE(vocab=content["model"]["vocab"], merges=pairs))
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    for text in (*SAMPLES, *MORE_SAMPLES, *random_texts(2000)):
        assert ours.encode(text) == theirs.encode(text).ids, repr(text)
        assert ours.decode(ours.encode(text)) == text
    assert len(ours.encode("1234567")) == 7
    assert ours.encode("<|im_start|>") == [1]
    assert ours.eos_token_ids == {2}
    assert ours.special_token_ids == set(range(17))


def test_gemma3_tokenises_like_sentencepiece(gemma3: Path) -> None:
    ours = Tokenizer.from_folder(gemma3)
    theirs = sentencepiece_processor(gemma3 / GEMMA3_GGUF)
    for text in (*SAMPLES, *MORE_SAMPLES, *random_texts(2000)):
        assert ours.encode(text, add_special=False) == theirs.encode(text), repr(text)
    assert ours.encode("Hello")[0] == ours.bos_token_id == 2
    assert ours.eos_token_ids == {1}


def sentencepiece_processor(gguf_path: Path) -> sentencepiece.SentencePieceProcessor:
    """The original library, on a model made of the file's pieces and scores."""
    protos: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    proto = protos.ModelProto()
    proto.trainer_spec.model_type = proto.trainer_spec.BPE
    proto.trainer_spec.byte_fallback = True
    proto.normalizer_spec.name = "identity"
    proto.normalizer_spec.add_dummy_prefix = False
    proto.normalizer_spec.remove_extra_whitespaces = False
    with GGUFFile(gguf_path) as file:
        vocabulary = read_vocabulary(file)
        unknown = file.integer("tokenizer.ggml.unknown_token_id")
    for index, kind in enumerate(vocabulary.kinds):
        text = vocabulary.tokens[index]
        if kind is TokenKind.USER_DEFINED:
            text = text.replace(" ", "\u2581")
        if index == unknown:
            kind = TokenKind.UNKNOWN
            proto.trainer_spec.unk_piece = text
        proto.pieces.add(piece=text, score=vocabulary.scores[index], type=int(kind))
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(proto.SerializeToString())
    return processor


def test_chat_prompts_are_those_of_transformers(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(smollm2)
    ours = Tokenizer.from_folder(smollm2)
    chats = [
        [Message("user", "What is the capital of France?")],
        [Message("system", "Be brief."), Message("user", "Hi"), Message("assistant", "Hello!")],
        [Message("user", "  a\n\nb  "), Message("assistant", ""), Message("user", "<b>&amp;</b>")],
    ]
    for chat in chats:
        messages = [message._asdict() for message in chat]
        text = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert ours.render_chat(chat).text == text
        assert ours.encode(text, add_special=False) == theirs.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_detokenizing_random_tokens_is_decoding_them(
    request: pytest.FixtureRequest, model: str
) -> None:
    tokenizer = Tokenizer.from_folder(request.getfixturevalue(model))
    rng = random.Random(11)
    for _ in range(300):
        token_ids = [
            rng.randrange(tokenizer.vocab_size) if rng.random() < 0.7 else rng.randrange(600)
            for _ in range(rng.randrange(40))
        ]
        detokenizer = Detokenizer(tokenizer)
        text = "".join(detokenizer.push([token_id]).text for token_id in token_ids)
        assert text + detokenizer.flush().text == tokenizer.decode(token_ids)
    for prompt in load_reference(model):
        detokenizer = Detokenizer(tokenizer)
        delta = detokenizer.push(prompt.output_ids)
        assert delta.text + detokenizer.flush().text == tokenizer.decode(prompt.output_ids)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_scaling_is_recognised(tmp_path: Path, factor: float) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    tiny = tmp_path / "tiny"
    write_tiny_model(tiny, family="llama")
    config = json.loads((tiny / "config.json").read_text())
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    half, theta = config["head_dim"] // 2, config["rope_theta"]
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](
        LlamaConfig(head_dim=2 * half, rope_parameters=scaling | {"rope_theta": theta}), None
    )
    divisors = (theta ** -(np.arange(half) / half) / scaled.numpy()).astype(np.float32)
    assert divisors.max() == pytest.approx(factor)
    write_gguf(tiny, tmp_path / "m.gguf", extra_tensors=[("rope_freqs.weight", divisors)])
    folder = imported(tmp_path / "m.gguf", tmp_path / "out")
    assert json.loads((folder / "config.json").read_text())["rope_scaling"] == scaling

    wrong = [("rope_freqs.weight", np.linspace(1, factor, half, dtype=np.float32))]
    write_gguf(tiny, tmp_path / "wrong.gguf", extra_tensors=wrong)
    with pytest.raises(ConfigurationError, match="rope scaling"):
        imported(tmp_path / "wrong.gguf", tmp_path / "out2")


def imported(file: Path, folder: Path) -> Path:
    folder.mkdir()
    import_gguf(file, folder, silent)
    return folder
