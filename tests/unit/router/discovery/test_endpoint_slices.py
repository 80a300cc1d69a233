"""What the set is after which lists and events of slices. Pure."""

from hypothesis import given
from hypothesis import strategies as st

from router.discovery.endpoint_slices import Endpoint, EndpointSet, Slice
from router.discovery.source import Targets
from router.placement.place import Place


def endpoint(host: str, *, is_ready: bool = True, is_terminating: bool = False) -> Endpoint:
    return Endpoint(host, is_ready, is_terminating)


def decode(name: str, *hosts: str | Endpoint, port: int | None = 1) -> Slice:
    endpoints = [endpoint(host) if isinstance(host, str) else host for host in hosts]
    return Slice(name, "decode", port, tuple(endpoints))


def new_set() -> EndpointSet:
    return EndpointSet(prefill=["prefill"], decode=["decode"])


def test_slices_of_one_service_join_and_those_of_others_do_not_count() -> None:
    known = new_set()
    known.listed(
        [
            decode("d-1", "a", "b"),
            decode("d-2", "b", "d"),
            Slice("p-1", "prefill", 2, (endpoint("a"),)),
            Slice("x-1", "other", 3, (endpoint("c"),)),
            decode("d-3", "without", port=None),
        ]
    )
    assert known.targets == Targets(
        prefill=frozenset({"a:2"}), decode=frozenset({"a:1", "b:1", "d:1"})
    )


def test_zones_are_told_of_those_that_are_used() -> None:
    known = new_set()
    endpoints = (
        Endpoint("a", True, False, "zone-1"),
        Endpoint("b", False, False, "zone-1"),
        Endpoint("c", True, False),
    )
    known.listed([decode("d-1", *endpoints)])
    assert known.targets.places == {"a:1": Place("zone-1")}


def test_a_service_of_both_families_names_each_pod_once() -> None:
    known = new_set()
    known.changed(decode("d-6", "fd00::1"))
    assert known.targets.decode == {"[fd00::1]:1"}
    known.changed(decode("d-4", "a"))
    assert known.targets.decode == {"a:1"}


def test_events_come_repeated_and_late() -> None:
    known = new_set()
    known.changed(decode("d-1", "a"))
    for _ in range(2):
        known.changed(decode("d-1", "a", "b"))
        assert known.targets.decode == {"a:1", "b:1"}
    known.changed(decode("d-2", "c"))
    for _ in range(2):
        known.deleted("d-1")
        assert known.targets.decode == {"a:1", "b:1", "c:1"}
    known.listed([decode("d-2", "c")])
    assert known.targets == Targets(decode=frozenset({"c:1"}))


def test_a_slice_that_goes_takes_no_pod_with_it_before_the_next_list() -> None:
    """Of more than a hundred pods there are several slices, that are made anew or put together."""
    known = new_set()
    known.listed([decode("d-1", "a", "b"), decode("d-2", "b", "c")])
    for name in ("d-1", "d-2"):
        known.deleted(name)
        assert known.targets.decode == {"a:1", "b:1", "c:1"}
    known.changed(decode("d-3", "c"))
    assert known.targets.decode == {"a:1", "b:1", "c:1"}
    known.changed(decode("d-1", "b"))
    assert known.targets.decode == {"b:1", "c:1"}, "it is there again, and has one less"
    known.listed([decode("d-1", "b")])
    assert known.targets.decode == {"b:1"}


def test_of_a_pod_the_slices_that_are_there_speak_before_one_that_went() -> None:
    known = EndpointSet(prefill=["prefill"], decode=["decode", "more"])
    known.listed([decode("d-1", "a", "b"), Slice("m-1", "more", 1, (endpoint("b"),))])
    known.changed(decode("d-2", endpoint("a", is_ready=False), endpoint("b", is_ready=False)))
    known.deleted("d-1")
    known.deleted("m-1")
    assert known.targets.decode == {"b:1"}, "of another service they do not speak"


def test_a_pool_is_empty_by_a_list_not_by_an_event() -> None:
    """A Service that is made anew has no slice for a moment."""
    known = new_set()
    known.listed([decode("d-1", "a")])
    known.deleted("d-1")
    assert known.targets.decode == {"a:1"}
    known.changed(decode("d-2", "b"))
    assert known.targets.decode == {"a:1", "b:1"}
    known.deleted("d-1")
    known.deleted("d-2")
    assert known.targets.decode == {"a:1", "b:1"}
    known.listed([])
    assert known.targets == Targets()


def test_of_several_services_one_may_be_made_anew() -> None:
    known = EndpointSet(prefill=[], decode=["decode", "more"])
    known.listed([decode("d-1", "a"), Slice("m-1", "more", 1, (endpoint("b"),))])
    known.deleted("m-1")
    assert known.targets.decode == {"a:1", "b:1"}
    known.changed(Slice("m-2", "more", 1, (endpoint("b"),)))
    known.deleted("m-1")
    assert known.targets.decode == {"a:1", "b:1"}
    known.listed([decode("d-1", "a")])
    assert known.targets.decode == {"a:1"}


def test_a_service_of_both_families_that_is_made_anew_keeps_its_family() -> None:
    known = new_set()
    known.listed([decode("d-4", "a"), decode("d-6", "fd00::1")])
    for name in ("d-4", "d-6"):
        known.deleted(name)
        assert known.targets.decode == {"a:1"}
    known.changed(decode("d-7", "fd00::1"))
    known.changed(decode("d-5", "a"))
    assert known.targets.decode == {"a:1"}


def test_a_service_whose_pods_go_is_not_taken_for_one_of_the_other_family() -> None:
    known = new_set()
    known.listed([decode("d-4", "a"), decode("d-6", "fd00::1")])
    known.changed(decode("d-4"))
    assert not known.targets.decode
    known.listed([decode("d-4"), decode("d-6", "fd00::1")])
    assert known.targets.decode == {"[fd00::1]:1"}, "it has that one alone now"


def test_a_list_makes_good_what_was_missed() -> None:
    known = new_set()
    known.listed([decode("d-1", "a"), decode("d-2", "b")])
    known.listed([decode("d-2", "b", "c")])
    assert known.targets.decode == {"b:1", "c:1"}


def test_an_endpoint_that_is_not_ready_is_not_used() -> None:
    known = new_set()
    unready = endpoint("b", is_ready=False)
    for _ in range(3):  # it flaps
        known.changed(decode("d-1", "a", unready))
        assert known.targets.decode == {"a:1"}
        known.changed(decode("d-1", "a", "b"))
        assert known.targets.decode == {"a:1", "b:1"}


def test_one_that_is_used_stays_while_it_terminates_until_it_is_gone() -> None:
    known = new_set()
    ending = endpoint("b", is_ready=False, is_terminating=True)
    known.listed([decode("d-1", "a", ending)])
    assert known.targets.decode == {"a:1"}, "it was not used"
    known.changed(decode("d-1", "a", "b"))
    known.changed(decode("d-1", "a", ending))
    known.listed([decode("d-1", "a", ending)])
    assert known.targets.decode == {"a:1", "b:1"}
    known.changed(decode("d-1", "a"))
    assert known.targets.decode == {"a:1"}
    known.changed(decode("d-1", "a", ending))
    assert known.targets.decode == {"a:1"}, "another pod of that address"


def test_without_a_service_for_it_there_is_no_prefill_pool() -> None:
    assert not EndpointSet(prefill=[], decode=["decode"]).targets.has_prefill_pool


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["d-1", "d-2", "d-3"]),
            st.none() | st.frozensets(st.sampled_from("abc")),
            st.booleans(),
        )
    )
)
def test_after_a_list_the_set_is_the_truth_whatever_was_heard(
    events: list[tuple[str, frozenset[str] | None, bool]],
) -> None:
    """Each event changes the truth; some are not heard."""
    known, truth = new_set(), dict[str, Slice]()
    for name, hosts, is_heard in events:
        if hosts is None:
            truth.pop(name, None)
            if is_heard:
                known.deleted(name)
        else:
            truth[name] = decode(name, *sorted(hosts))
            if is_heard:
                known.changed(truth[name])
    known.listed(truth.values())
    hosts_now = {each.address for one in truth.values() for each in one.endpoints}
    assert known.targets.decode == {f"{host}:1" for host in hosts_now}
