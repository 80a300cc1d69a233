"""The longest sequence that workers can run, also while some of them are away. Pure."""


class LongestSequence:
    """Of each pool the roomiest worker counts, of these the pool with the least room.

    A worker that is lost, starts or drains counts by what it was: it comes back, or is left.
    """

    def __init__(self) -> None:
        self._lengths: dict[tuple[str, int], int] = {}  # by address and role

    def serves(self, address: str, role: int, num_tokens: int) -> None:
        """A worker is used, for sequences of up to so many tokens."""
        self._lengths[address, role] = num_tokens

    def serves_no_more(self, address: str, role: int) -> None:
        """It is not used any longer, or was left."""
        self._lengths.pop((address, role), None)

    @property
    def num_tokens(self) -> int | None:
        """As last known; None: nothing is."""
        pools: dict[int, int] = {}
        for (_, role), num_tokens in self._lengths.items():
            pools[role] = max(num_tokens, pools.get(role, 0))
        return min(pools.values(), default=None)
