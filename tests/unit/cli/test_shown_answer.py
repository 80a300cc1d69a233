"""What of an answer reaches a terminal, and what a file."""

import io

import pytest

from diptych.cli.shown_answer import write_text


class _Output(io.StringIO):
    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("a\tb\r\nc\u00a0\u3000d", "a\tb\nc\u00a0\u3000d"),
        ("\U0001f469\u200d\U0001f52c", "\U0001f469\u200d\U0001f52c"),
        ("\x1b]0;own\x07", r"\x1b]0;own\x07"),
        ("safe\rlost\x08\x00", r"safelost\x08\x00"),
        ("\x9b31m\x7f", r"\x9b31m\x7f"),
    ],
)  # fmt: skip
def test_a_terminal_is_told_nothing_that_it_would_obey(
    said: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_terminal, expected in ((True, shown), (False, said)):
        output = _Output(is_terminal=is_terminal)
        monkeypatch.setattr("sys.stdout", output)
        for piece in said:  # however it comes
            write_text(piece)
        assert output.getvalue() == expected
