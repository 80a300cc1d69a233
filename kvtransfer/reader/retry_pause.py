"""How long a pair that could not be proven is left alone. Pure."""

from random import Random

from kvtransfer.config import TransferConfig


class RetryPause:
    """Twice as long after each failure, up to a limit, and spread around that by half of it.

    Pairs that failed together, as a source ended, are not tried again together.
    """

    def __init__(self, config: TransferConfig, random: Random) -> None:
        self._config = config
        self._random = random
        self._mean_s = config.reconnect_min_s

    def reset(self) -> None:
        """The pair was proven."""
        self._mean_s = self._config.reconnect_min_s

    def next_s(self) -> float:
        """It failed, once more."""
        pause_s = self._random.uniform(0.5, 1.5) * self._mean_s
        self._mean_s = min(2 * self._mean_s, self._config.reconnect_max_s)
        return pause_s
