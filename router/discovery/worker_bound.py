"""How many workers a source may name: a name that stands for half a network is a mistake. Pure."""

from dataclasses import replace

from router.discovery.source import Doubt, Targets


class WorkerBound:
    """Takes so many workers of each pool, and those that it took before them first.

    Owned by one source. It is told once that there are more, until there are not.
    """

    def __init__(self, max_workers: int) -> None:
        self._max_workers = max_workers
        self._taken = Targets()
        self._doubts = {
            pool: Doubt("more workers are named than are taken", pool=pool)
            for pool in ("prefill", "decode")
        }

    def of(self, named: Targets) -> Targets:
        """What is taken of those that are named."""
        self._taken = replace(
            named,
            prefill=self._some("prefill", named.prefill, self._taken.prefill),
            decode=self._some("decode", named.decode, self._taken.decode),
        )
        return self._taken

    def _some(self, pool: str, named: frozenset[str], before: frozenset[str]) -> frozenset[str]:
        if len(named) <= self._max_workers:
            self._doubts[pool].over()
            return named
        self._doubts[pool].because(f"only {self._max_workers} are taken (max_workers)")
        in_turn = sorted(named, key=lambda address: (address not in before, address))
        return frozenset(in_turn[: self._max_workers])
