"""Which addresses DNS names stand for, after each answer. Pure."""

from collections.abc import Sequence

from router.discovery.source import Doubt, Targets

_ANSWERS_WITHOUT = 3  # in a row, before it is believed that an address is gone


class _Name:
    """What is known of one name. ``is_sure``: by its last answer."""

    def __init__(self, name: str) -> None:
        self.addresses: frozenset[str] = frozenset()
        self.is_sure = False
        self._num_missed: dict[str, int] = {}  # of each address, answers in a row without it
        self._doubt = Doubt("a name of workers is in doubt: those known stay", name_of_workers=name)

    def answered(self, addresses: frozenset[str]) -> None:
        missing = self.addresses - addresses
        self._num_missed = {each: self._num_missed.get(each, 0) + 1 for each in missing}
        doubted = {each for each in missing if self._num_missed[each] < _ANSWERS_WITHOUT}
        self.addresses = addresses | doubted
        self.is_sure = not doubted
        if not addresses and doubted:
            self._doubt.because("the answer is empty")
        else:
            self._doubt.over()

    def failed(self, why: str) -> None:
        self._num_missed.clear()
        self.is_sure = False
        self._doubt.because(why)


class NameSet:
    """The set that all names together stand for. Owned by the discovery.

    No answer changes nothing, and an address is gone only when several answers in a row were
    without it: a server that has just started knows nobody, and one that keeps old answers
    tells them in turn with new ones. Where a pod is gone indeed, its Watch says so at once.
    """

    def __init__(self, *, prefill: Sequence[str], decode: Sequence[str]) -> None:
        self._prefill = {name: _Name(name) for name in prefill}
        self._decode = {name: _Name(name) for name in decode}

    @property
    def names(self) -> tuple[str, ...]:
        """To ask for, each once."""
        return tuple({**self._prefill, **self._decode})

    @property
    def is_sure(self) -> bool:
        """Whether the last answer for every name was one, and was believed."""
        return all(name.is_sure for name in self._all(self.names))

    def answered(self, name: str, addresses: frozenset[str]) -> None:
        """``name`` stands for these, as host:port; none if there is no such name."""
        for each in self._all([name]):
            each.answered(addresses)

    def failed(self, name: str, why: str) -> None:
        """Nobody could say what ``name`` stands for."""
        for each in self._all([name]):
            each.failed(why)

    @property
    def targets(self) -> Targets:
        """The set as known now."""
        prefill = (name.addresses for name in self._prefill.values())
        decode = (name.addresses for name in self._decode.values())
        return Targets(
            prefill=frozenset().union(*prefill),
            decode=frozenset().union(*decode),
            has_prefill_pool=bool(self._prefill),
        )

    def _all(self, names: Sequence[str]) -> list[_Name]:
        pools = (self._prefill, self._decode)
        return [pool[name] for name in names for pool in pools if name in pool]
