"""What other files than tokenizer.json say of tokens."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as HFTokenizer

from diptych.errors import ConfigurationError
from diptych.text.tokenizer import Tokenizer
from tests.text_models import byte_level_tokenizer, write_folder

NEW_ID = byte_level_tokenizer().get_vocab_size()
ADDED_ID = NEW_ID - 1  # "added token", which is plain in tokenizer.json


def entry(text: str, *, special: bool) -> dict[str, object]:
    names = ("lstrip", "rstrip", "normalized", "single_word")
    return {"content": text, "special": special, **dict.fromkeys(names, False)}


def listed(*tokens: tuple[int, str]) -> dict[str, dict[str, object]]:
    return {str(token_id): entry(text, special=True) for token_id, text in tokens}


def test_what_tokenizer_json_lacks_is_added(tmp_path: Path) -> None:
    tokens = listed((NEW_ID + 1, "<|end|>"), (0, "<s>"), (NEW_ID, "<|begin|>"))
    tokenizer = write_folder(tmp_path, byte_level_tokenizer(), added_tokens_decoder=tokens)
    assert tokenizer.encode("<|begin|><|end|><s>") == [NEW_ID, NEW_ID + 1, 0]
    assert tokenizer.special_token_ids >= {0, NEW_ID, NEW_ID + 1}


def test_a_piece_of_the_vocabulary_may_be_a_token_of_its_own(tmp_path: Path) -> None:
    raw = byte_level_tokenizer()
    piece = raw.id_to_token(300)
    assert piece is not None
    tokens = listed((300, piece))
    tokenizer = write_folder(tmp_path, raw, added_tokens_decoder=tokens)
    assert 300 in tokenizer.special_token_ids


def test_special_is_what_either_file_calls_so(tmp_path: Path) -> None:
    tokens = listed((ADDED_ID, "added token")) | {"0": entry("<s>", special=False)}
    tokenizer = write_folder(tmp_path, byte_level_tokenizer(), added_tokens_decoder=tokens)
    ids = tokenizer.encode("<s>an added token", add_special=False)
    assert {0, ADDED_ID} <= set(ids)
    assert tokenizer.special_token_ids == {0, 1, ADDED_ID}
    assert tokenizer.decode(ids) == "an "
    assembler = tokenizer.text.assembler()
    assert "".join(map(assembler.push, ids)) == "an "


def test_added_tokens_json_counts_where_no_other_file_lists_tokens(tmp_path: Path) -> None:
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<x>": NEW_ID, "<end>": NEW_ID + 1}))
    settings = {"eos_token": "<end>"}
    path = tmp_path / "config.json"
    tokenizer = write_folder(tmp_path, byte_level_tokenizer(), **settings)
    assert tokenizer.eos_token_ids == {2}, "the model cannot draw the other one"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": NEW_ID + 2}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("<x><end>") == [NEW_ID, NEW_ID + 1]
    assert NEW_ID not in tokenizer.special_token_ids
    assert NEW_ID + 1 in tokenizer.special_token_ids & tokenizer.eos_token_ids
    without = settings | {"eos_token": "</s>", "added_tokens_decoder": {}}
    tokenizer = write_folder(tmp_path, byte_level_tokenizer(), **without)
    assert NEW_ID not in tokenizer.encode("<x>")


def test_a_piece_of_the_vocabulary_that_is_named_as_special_is_a_token(tmp_path: Path) -> None:
    content = json.loads(byte_level_tokenizer().to_str())
    content["added_tokens"] = []
    content["model"]["vocab"] |= {"<pad>": NEW_ID, "<turn>": NEW_ID + 1}
    raw = HFTokenizer.from_str(json.dumps(content))
    settings = {"pad_token": "<pad>", "additional_special_tokens": ["<turn>", "<nowhere>"]}
    tokenizer = write_folder(tmp_path, raw, **settings)
    assert tokenizer.special_token_ids == {0, 1, NEW_ID + 1}
    assert {tokenizer.bos_token_id} | tokenizer.eos_token_ids == {0, 1, 2}
    ids = tokenizer.encode("<turn>a</s><s>b", add_special=False)
    assert ids == [NEW_ID + 1, *tokenizer.encode("a"), 1, 0, *tokenizer.encode("b")]
    assert tokenizer.decode(ids) == "ab"
    assert NEW_ID not in tokenizer.encode("<pad>"), "it may be any word"


def test_one_that_cannot_have_its_id_is_named(tmp_path: Path) -> None:
    for tokens in (listed((NEW_ID + 7, "<new>")), listed((5, "<new>"))):
        with pytest.raises(ConfigurationError, match=r"tokenizer_config\.json: '<new>' is token "):
            write_folder(tmp_path, byte_level_tokenizer(), added_tokens_decoder=tokens)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<x>": NEW_ID + 1}))
    with pytest.raises(ConfigurationError, match=r"added_tokens\.json: '<x>' is token "):
        write_folder(tmp_path, byte_level_tokenizer())


def test_odd_entries_of_known_tokens_and_of_none_are_no_matter(tmp_path: Path) -> None:
    odd = {"0": {"content": "<s>", "lstrip": None, "special": 1}, "9": {"content": ""}}
    plain = write_folder(tmp_path, byte_level_tokenizer()).encode("<s>a")
    tokens: object
    for tokens in (odd, [], {}):
        tokenizer = write_folder(tmp_path, byte_level_tokenizer(), added_tokens_decoder=tokens)
        assert tokenizer.encode("<s>a") == plain


@pytest.mark.parametrize("tokens", ["a", {"a": {"content": "a"}}, {"9": {}}, {"9": "a"}])
def test_what_lists_no_tokens_is_named(tmp_path: Path, tokens: object) -> None:
    with pytest.raises(ConfigurationError, match=r"tokenizer_config\.json: its added tokens must"):
        write_folder(tmp_path, byte_level_tokenizer(), added_tokens_decoder=tokens)


@pytest.mark.parametrize("text", ["[]", "{", '{"a": "b"}', '{"a": [1]}', '{"a": 1e999}'])
def test_a_file_that_lists_no_tokens_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "added_tokens.json").write_text(text)
    with pytest.raises(ConfigurationError, match=r"added_tokens\.json: "):
        write_folder(tmp_path, byte_level_tokenizer())


def test_an_end_that_is_no_token_is_named(tmp_path: Path) -> None:
    for name in ("<gone>", ""):  # config.json names one
        assert write_folder(tmp_path, byte_level_tokenizer(), eos_token=name).eos_token_ids == {2}
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["eos_token_id"]
    path.write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<gone>"}')
    with pytest.raises(ConfigurationError, match="eos_token '<gone>' is no token"):
        Tokenizer.from_folder(tmp_path)
