"""The events of one answer on their way to its client: by the task that answers, or past it."""

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Final, Generic, Protocol, TypeVar

from router.frontend.http.exchange import Exchange

_QUIET_S: Final = 10.0  # proxies end what says nothing for long
_COMMENT: Final = b": the model is still at it\n\n"
_Event = TypeVar("_Event")
_Told = TypeVar("_Told", contravariant=True)


class _Writer(Protocol[_Told]):
    """See :class:`router.frontend.http.answer_writer.StreamWriter`."""

    def send(self, event: _Told, /) -> bytes: ...

    def parts(self, event: _Told, /) -> Iterator[str]: ...


class EventStream(Generic[_Event]):
    """Writes what events say, and a comment where they say nothing for long.

    It is the ``Outlet`` of the answer that it sends, open while ``send`` waits for an event and
    the connection takes more. Owned by the task that answers.
    """

    __slots__ = (
        "_clock",
        "_exchange",
        "_say",
        "_told_s",
    )

    def __init__(self, exchange: Exchange, clock: Callable[[], float]) -> None:
        self._exchange = exchange
        self._clock = clock
        self._say: Callable[[_Event], bytes] | None = None  # as soon as it is sent
        self._told_s = 0.0

    async def send(
        self,
        writer: _Writer[_Event],
        event: _Event | None,
        events: AsyncIterator[_Event],
    ) -> None:
        """From the first of its events to the end; ``writer`` says what is sent of each."""
        self._say = writer.send
        self._told_s = self._clock()
        while event is not None:
            is_told = await self._exchange.send_events(writer.parts(event))
            if not is_told and self._is_quiet:
                await self._exchange.send_piece(_COMMENT)
                is_told = True
            if is_told:
                self._told_s = self._clock()
            event = await anext(events, None)
        await self._exchange.end_stream()

    @property
    def is_open(self) -> bool:
        """See :class:`router.generation.answer.Outlet`."""
        return self._say is not None and self._exchange.takes_more

    def write(self, event: _Event) -> None:
        """See :class:`router.generation.answer.Outlet`."""
        assert self._say is not None
        piece = self._say(event)
        if not piece and self._is_quiet:
            piece = _COMMENT
        if piece:
            self._exchange.write_piece(piece)
            self._told_s = self._clock()

    @property
    def _is_quiet(self) -> bool:
        """Whether nothing was said for long: what comes is kept, as a call is told whole."""
        return self._clock() - self._told_s > _QUIET_S
