"""A mark as a grammar has it: tokens where the tokenizer has them, text between."""

from diptych.text.mark import Mark

ADDED = {"<|a|>": 7, "<|a|>b": 9, "": 3}


def test_what_is_a_token_is_that_token_and_the_rest_is_text() -> None:
    mark = Mark.of('say "<|a|>c<|a|>b', ADDED)
    assert mark.in_lark(has_tokens=True) == r'"say \"" <[7]> "c" <[9]>'
    assert mark.in_lark(has_tokens=False) == r'"say \"<|a|>c<|a|>b"'
    assert Mark.from_plain([tuple(part) for part in mark]) == mark
    assert mark.text == 'say "<|a|>c<|a|>b'


def test_without_tokens_all_is_text_and_of_nothing_there_is_nothing() -> None:
    assert Mark.of("<|a|>", {}).in_lark(has_tokens=True) == '"<|a|>"'
    assert [Mark.of("", ADDED).in_lark(has_tokens=each) for each in (True, False)] == ["", ""]
