"""What an output is held to, once that was found good. Pure."""

from typing import NamedTuple

from diptych.text.mark import Mark
from diptych.text.thought_form import ThoughtForm


class CheckedForm(NamedTuple):
    """A grammar for the workers, and what of it are thoughts."""

    grammar: str
    thoughts: ThoughtForm | None = None
    """Those that may come before the answer; None: all of it is the answer."""
    calls: tuple[Mark, ...] = ()
    """What begins calls, which may come in the answer's place."""
