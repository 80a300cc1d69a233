"""A transport over which a source took our agent with it rests longer each time."""

from kvtransfer.reader.transport_rests import TransportRests

REPROVE_S = 30.0


def test_it_rests_twice_as_long_each_time_up_to_a_limit_until_it_worked() -> None:
    rests = TransportRests()
    now = 100.0
    for length_s in (15.0, 30.0, 60.0, 120.0, 240.0, 480.0, 480.0):
        rests.took_agent("nixl", "no answer", now, REPROVE_S)
        assert rests.resting(now + length_s - 1) == {"nixl": "no answer"}
        now += length_s
        assert not rests.resting(now)
    rests.worked("nixl")
    rests.worked("inline")
    rests.took_agent("nixl", "no answer", now, REPROVE_S)
    assert not rests.resting(now + 15.0)


def test_each_transport_rests_by_itself() -> None:
    rests = TransportRests()
    rests.took_agent("nixl", "no answer", 0.0, REPROVE_S)
    rests.took_agent("ucxx", "signal 11", 10.0, REPROVE_S)
    assert rests.resting(12.0) == {"nixl": "no answer", "ucxx": "signal 11"}
    assert rests.resting(20.0) == {"ucxx": "signal 11"}
