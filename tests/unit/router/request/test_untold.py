"""What a request's machine does when a worker does not tell what was wanted of a token."""

from diptych.token_logprobs import TokenLogprobs
from router.request import events
from tests.unit.router.request.world import PROMPT, World, worker


def test_a_first_token_without_the_log_probability_that_was_wanted_is_computed_elsewhere() -> None:
    world = World(has_logprobs=True).begin()
    world.bind()
    world.first()
    assert world.emitted == []
    assert world.lease.worker == worker("p2")


def test_tokens_without_the_log_probabilities_that_were_wanted_are_made_elsewhere() -> None:
    world = World(has_logprobs=True).begin()
    world.bind()
    found = TokenLogprobs(-1.0, (), ())
    sequence_id, position = world.lease.sequence_id, len(PROMPT)
    world.on(events.FirstToken(sequence_id, 20, position, None, 0, found))
    world.prove()
    sequence_id = world.reservation.sequence_id
    world.on(events.Tokens(sequence_id, position + 1, (21,), (), (found,)))
    assert world.emitted == [20, 21]
    world.tokens(22)
    assert world.emitted == [20, 21]
    assert sequence_id not in world.reservations
    assert world.reservation.worker == worker("d2")
