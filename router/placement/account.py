"""What one whose turn it may be has been charged. Pure."""

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator


class Account:
    """What one was charged or lifted to, s of engines; and who was lifted to it.

    Whoever comes back after a pause is lifted to the one that was charged the least of those that
    wait. Was that one charged too much then, so is he. Lifts and charges are numbered in one order.
    """

    __slots__ = ("_followers", "_leader", "_lifted_s", "counter_s", "lift")

    def __init__(self, number: int) -> None:
        self.counter_s = 0.0
        self.lift = number  # the last one
        self._lifted_s = 0.0  # what is left of that
        self._leader: Account | None = None  # to whom that was; None: to nobody who waited
        self._followers = OrderedDict[Account, None]()  # the newest is last

    def lift_to(self, level_s: float, leader: "Account | None", number: int) -> None:
        """Now, to what ``leader`` has been charged."""
        self.forget()
        self._lifted_s, self.counter_s, self.lift = level_s - self.counter_s, level_s, number
        self._leader = leader
        if leader is not None:
            leader._followers[self] = None

    def forget(self) -> None:
        """It follows nobody any more."""
        if self._leader is not None:
            self._leader._followers.pop(self)
            self._leader = None

    def dismiss(self) -> None:
        """Nobody follows it any more."""
        for each in list(self._followers):
            each.forget()

    def keep(self, seconds: float, charged: int) -> None:
        """So much of what was charged then is not given back, for it was lifted since.

        Had it been given back before, the lift would have been so much larger.
        """
        if self.lift > charged:
            self._lifted_s += seconds

    def lower(
        self, seconds: float, charged: int, others: "Callable[[], Iterable[Account]]"
    ) -> Iterator["Account"]:
        """So much that was charged then was too much; yields all that are lower because of it.

        Who was lifted to it since follows, as far as he was lifted, and to before none of the
        ``others``: of these those count that were lifted before, or to nobody.
        """
        lower = [(self, seconds, charged)]
        while lower:
            one, seconds, charged = lower.pop()
            one.counter_s -= seconds
            yield one
            followers = one._followers_since(charged) if seconds > 0.0 else []
            least_s = -math.inf
            if followers:
                there = (each for each in others() if each is not one)
                bounds = [each for each in there if each.lift <= charged or each._leader is None]
                least_s = min((each.counter_s for each in bounds), default=-math.inf)
            for each in followers:
                too_much_s = min(seconds, each._lifted_s, max(0.0, each.counter_s - least_s))
                each._lifted_s -= too_much_s
                if too_much_s > 0.0:
                    lower.append((each, too_much_s, each.lift))

    def _followers_since(self, charged: int) -> "list[Account]":
        newest = reversed(self._followers)
        return list(itertools.takewhile(lambda each: each.lift > charged, newest))
