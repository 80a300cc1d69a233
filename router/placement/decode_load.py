"""What sequences one decode worker has, and what of ours it has not told of. Pure."""

from collections.abc import Sequence

from diptych.paced import Paced
from router.placement.local_prompts import LocalPrompts
from router.placement.own_sequences import OwnSequences, Shares
from router.placement.promises import OwnPromises, Promise, Promised


class DecodeLoad:
    """Of one worker, as one router knows it: what it told less our own then, plus our own now.

    Who hears how the worker is calls ``told``; who sends to it, or hears of a sequence, the rest.
    """

    def __init__(self, owner: str) -> None:
        """``owner``: the router, as the worker calls it."""
        self._own = OwnSequences()
        self._unheard: set[int] = set()  # of these, such as the worker has said nothing of
        self._prompts = LocalPrompts()
        self._promises = OwnPromises(owner)
        self._num_others = 0
        self._paced: Sequence[Paced] | None = None  # as it told

    def asked(
        self, sequence_id: int, payer: bytes | None, promise: Promise, num_prompt_tokens: int
    ) -> None:
        """It is asked for blocks for one more. ``payer``: None of a batch's; ``num_prompt_tokens``:
        of its prompt, that it will compute itself.
        """
        self._own.add(sequence_id, payer)
        self._unheard.add(sequence_id)
        self._promises.placed(sequence_id, promise)
        if num_prompt_tokens:
            self._prompts.asked(sequence_id, num_prompt_tokens)

    def answered(self, sequence_id: int) -> None:
        """It said something of one: it counts that in what it tells."""
        self._unheard.discard(sequence_id)

    def reserved(self, sequence_id: int, num_cached_tokens: int) -> bool:
        """One has its blocks, and so many of its prompt's tokens in them; whether it is less to
        compute for that.
        """
        self._unheard.discard(sequence_id)
        return self._prompts.reserved(sequence_id, num_cached_tokens)

    def bound(self, sequence_id: int) -> bool:
        """One pulls its prompt, whatever it was asked for; whether it was to compute that."""
        return self._prompts.over(sequence_id)

    def started(self, sequence_id: int, now_s: float) -> None:
        """It is told to run one."""
        self._prompts.started(sequence_id, now_s)

    def drew(self, sequence_id: int) -> bool:
        """A token of one came; whether its prompt had not been told of."""
        self._promises.drew(sequence_id)
        return self._prompts.over(sequence_id)

    def over(self, sequence_id: int) -> None:
        """One is there no more. Idempotent."""
        self._own.remove(sequence_id)
        self._unheard.discard(sequence_id)
        self._prompts.over(sequence_id)
        self._promises.over(sequence_id)

    def clear(self) -> None:
        """All of ours are over."""
        self._own.clear()
        self._unheard.clear()
        self._prompts.clear()
        self._promises.clear()

    def told(self, num_sequences: int, paced: Sequence[Paced] | None, heard_s: float) -> None:
        """It said how it is, which was heard then: what is not ours of its sequences is others'.

        What it has not answered yet is taken to have been on its way to it. ``paced``: those that
        decode and can lose the least; None: it does not say.
        """
        self._num_others = max(0, num_sequences - self.num_heard)
        self._prompts.told(heard_s)
        self._paced = paced
        if paced is not None:
            self._promises.told(paced)

    @property
    def num_own(self) -> int:
        """Sequences of this router."""
        return len(self._own)

    @property
    def num_heard(self) -> int:
        """Of these, such as it has answered: the others may be on their way to it."""
        return len(self._own) - len(self._unheard)

    @property
    def num_sequences(self) -> int:
        """All routers' together."""
        return len(self._own) + self._num_others

    @property
    def shares(self) -> Shares:
        """Whose ours are."""
        return self._own.shares()

    @property
    def promised(self) -> Promised:
        """Of ours that it has not told of."""
        return self._promises.promised

    @property
    def paced(self) -> tuple[Paced, ...] | None:
        """Those that it told of and that are there still; of ours, the ways in which they may go
        on. None: it does not say.
        """
        return None if self._paced is None else self._promises.still_there(self._paced)

    @property
    def num_ended_rows(self) -> int:
        """Of ours, that decoded when it told."""
        return self._promises.num_ended

    @property
    def num_sent_tokens(self) -> int:
        """Of prompts of ours that it computes itself, since it told."""
        return self._prompts.num_tokens
