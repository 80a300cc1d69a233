"""What of the tokens that workers tell is emitted."""

from collections.abc import Sequence

import pytest

from diptych.token_logprobs import TokenLogprobs
from router.request.emitted_tokens import EmittedTokens, RequestShape


class Sink(list[int]):
    """Keeps what is emitted."""

    def __call__(
        self, token_ids: Sequence[int], margins: Sequence[float], logprobs: Sequence[TokenLogprobs]
    ) -> bool:
        assert len(token_ids) == len(margins)
        self.extend(token_ids)
        return False


@pytest.mark.parametrize("num_known", [0, 1, 2])
def test_no_more_is_emitted_than_was_asked_for(num_known: int) -> None:
    """However many a worker tells at once, and where it begins."""
    sunk = Sink()
    emitted = EmittedTokens(RequestShape(prompt_ids=(1, 2, 3), max_tokens=4), sunk)
    assert emitted.accept(3, [10, 11], [0.1, 0.1])
    assert not emitted.complete_reason
    told = list(range(12 - num_known, 20))
    assert emitted.accept(5 - num_known, told, [0.1] * len(told))
    assert sunk == emitted.token_ids == [10, 11, 12, 13]
    assert emitted.complete_reason
    assert emitted.num_sequence_tokens == emitted.num_max_tokens == 7


def test_nothing_follows_a_complete_answer() -> None:
    sunk = Sink()
    shape = RequestShape(prompt_ids=(1,), max_tokens=9, stop_token_ids=frozenset({7}))
    emitted = EmittedTokens(shape, sunk)
    for position, token_id in enumerate((5, 7, 6), start=1):
        assert emitted.accept(position, [token_id], [0.1])
    assert sunk == emitted.token_ids == [5, 7]
