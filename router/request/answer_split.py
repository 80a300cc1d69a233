"""An answer's text taken apart as it comes: for the reader, thought, called."""

from collections.abc import Callable

from diptych.text.response.body import ParsedCall
from diptych.text.response.parser import Parsed
from diptych.text.response.thoughts import AnswerParser
from router.generation.answer import CalledTool, Said


class AnswerSplit:
    """The parser of one answer, and the names of the calls in it. The one owner is its builder."""

    def __init__(
        self, parser: AnswerParser, make_id: Callable[[str], str], max_calls: int | None = None
    ) -> None:
        """``make_id`` names a call, of the tool that it is told, which the model did not name,
        or as another; calls beyond ``max_calls`` are dropped."""
        self._parser = parser
        self._make_id = make_id
        self._max_calls = max_calls
        self._num_calls = 0
        self._ids: set[str] = set()

    @property
    def has_calls(self) -> bool:
        """Whether there was a call."""
        return self._num_calls > 0

    def add(self, text: str) -> Said:
        """More text."""
        return self._said(self._parser.feed(text))

    def finish(self, *, is_whole: bool) -> Said:
        """The rest; ``is_whole``: the model ended its answer."""
        return self._said(self._parser.finish(is_whole=is_whole))

    def _said(self, parsed: Parsed) -> Said:
        calls = parsed.calls
        if self._max_calls is not None:
            calls = calls[: self._max_calls - self._num_calls]
        self._num_calls += len(calls)
        called = tuple(CalledTool(self._id(each), each.name, each.arguments) for each in calls)
        return Said(parsed.content, parsed.reasoning, called)

    def _id(self, call: ParsedCall) -> str:
        """The model's own, where it has one: its chat template shows it to it again."""
        made = self._make_id(call.name)  # the next one's are the same either way
        if call.id and call.id not in self._ids:
            made = call.id
        while made in self._ids:
            made = self._make_id(call.name)
        self._ids.add(made)
        return made
