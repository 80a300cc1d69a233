"""The items of a response as they come, and the events that tell of each. Pure.

An item of text (thought or said) is open for as long as more of its kind comes; a call comes
whole. Invariants: one item is open at most, and it is the last; every item that was begun is
in ``items`` in the end, with the index that its events have.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from router.frontend.http.json_parts import SmallItems
from router.generation.answer import CalledTool, Delta

Entries = Sequence[Mapping[str, object]]
"""Log probabilities, one entry for each token."""
Event = Mapping[str, object]
"""Without its ``sequence_number``."""

_DONE: Final = "completed"


class _Kind(NamedTuple):
    """An item of one text."""

    name: str
    id_prefix: str
    event: str
    members: Mapping[str, object]
    """Of the item, beside those that all have."""
    part: Mapping[str, object]
    """Its one part, beside the text."""
    has_logprobs: bool


_REASONING: Final = _Kind(
    "reasoning", "rs", "reasoning_text", {"summary": []}, {"type": "reasoning_text"}, False
)
_MESSAGE: Final = _Kind(
    "message",
    "msg",
    "output_text",
    {"role": "assistant"},
    {"type": "output_text", "annotations": []},
    True,
)


@dataclass(slots=True)
class _Open:
    """What is being said."""

    kind: _Kind
    item_id: str
    texts: list[str] = field(default_factory=list)
    logprobs: SmallItems[Mapping[str, object]] = field(default_factory=SmallItems)

    def item(self, status: str, content: Sequence[object]) -> Mapping[str, object]:
        """The item with these parts."""
        kind = self.kind
        return {
            "id": self.item_id,
            "type": kind.name,
            "status": status,
            **kind.members,
            "content": content,
        }

    def part(self) -> Mapping[str, object]:
        """All that was said so far."""
        return {**self.kind.part, "text": "".join(self.texts), **self._told(self.logprobs)}

    def address(self, index: int) -> Mapping[str, object]:
        """What says where the part is."""
        return {"item_id": self.item_id, "output_index": index, "content_index": 0}

    def _told(self, logprobs: Entries) -> Mapping[str, object]:
        return {"logprobs": logprobs} if self.kind.has_logprobs else {}

    def delta(self, text: str, logprobs: Entries) -> Mapping[str, object]:
        """More of it."""
        self.texts.append(text)
        self.logprobs += logprobs
        return {"delta": text, **self._told(logprobs)}

    def done(self) -> Mapping[str, object]:
        """All of it, in one event."""
        return {"text": "".join(self.texts), **self._told(self.logprobs)}


class ResponseOutput:
    """The one owner is what writes the response."""

    def __init__(self, request_id: str) -> None:
        self.items: list[Mapping[str, object]] = []
        """Those that are done."""
        self.num_reasoning_tokens = 0
        """Those that came with nothing but reasoning, or while it went on and nothing came."""
        self._request_id = request_id
        self._open: _Open | None = None
        self._unsaid = SmallItems[Mapping[str, object]]()  # of tokens whose text did not come yet

    def add(self, delta: Delta, logprobs: Entries = ()) -> Iterator[Event]:
        """More of the answer; ``logprobs`` are those of its tokens."""
        self._unsaid += logprobs
        has_more = bool(delta.text or delta.tool_calls)
        if not has_more and (delta.reasoning or self._is_reasoning):
            self.num_reasoning_tokens += len(delta.token_ids)
        if delta.reasoning:
            yield from self._say(_REASONING, delta.reasoning)
        if delta.text:
            yield from self._say(_MESSAGE, delta.text)
        for call in delta.tool_calls:
            yield from self._close(_DONE)
            yield from self._call(call)
        if delta.tool_calls or delta.reasoning:
            self._unsaid = SmallItems()  # they were no message's

    def finish(self, status: str) -> Iterator[Event]:
        """The end of what is being said; an answer of nothing is an empty message.

        Tokens without a text that came last, as the one that ended the answer, are the message's.
        """
        if self._open is None and not self.items:
            yield from self._begin(_MESSAGE)
        if self._unsaid and self._open is not None and self._open.kind is _MESSAGE:
            yield from self._say(_MESSAGE, "")
        yield from self._close(status)

    @property
    def _is_reasoning(self) -> bool:
        return self._open is not None and self._open.kind is _REASONING

    def _say(self, kind: _Kind, text: str) -> Iterator[Event]:
        if self._open is None or self._open.kind is not kind:
            yield from self._close(_DONE)
            yield from self._begin(kind)
        opened = self._open
        assert opened is not None
        told: Entries = ()
        if kind.has_logprobs:
            told, self._unsaid = self._unsaid, SmallItems()
        said = {**opened.address(len(self.items)), **opened.delta(text, told)}
        yield {"type": f"response.{kind.event}.delta", **said}

    def _begin(self, kind: _Kind) -> Iterator[Event]:
        index = len(self.items)
        opened = self._open = _Open(kind, self._item_id(kind.id_prefix))
        item = opened.item("in_progress", [])
        yield {"type": "response.output_item.added", "output_index": index, "item": item}
        where = opened.address(index)
        yield {"type": "response.content_part.added", **where, "part": opened.part()}

    def _close(self, status: str) -> Iterator[Event]:
        opened, self._open = self._open, None
        if opened is None:
            return
        index = len(self.items)
        where, part = opened.address(index), opened.part()
        item = opened.item(status, [part])
        self.items.append(item)
        yield {"type": f"response.{opened.kind.event}.done", **where, **opened.done()}
        yield {"type": "response.content_part.done", **where, "part": part}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}

    def _call(self, call: CalledTool) -> Iterator[Event]:
        index = len(self.items)
        item_id = self._item_id("fc")
        item: dict[str, object] = {
            "id": item_id,
            "type": "function_call",
            "call_id": call.call_id,
            "name": call.name,
        }
        done = {**item, "status": _DONE, "arguments": call.arguments}
        self.items.append(done)
        begun = {**item, "status": "in_progress", "arguments": ""}
        yield {"type": "response.output_item.added", "output_index": index, "item": begun}
        where = {"item_id": item_id, "output_index": index}
        kind = "response.function_call_arguments"
        yield {"type": f"{kind}.delta", **where, "delta": call.arguments}
        told = {"name": call.name, "arguments": call.arguments}
        yield {"type": f"{kind}.done", **where, **told}
        yield {"type": "response.output_item.done", "output_index": index, "item": done}

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}_{self._request_id}_{len(self.items)}"
