"""Who is chosen, of whom placement sees. Pure."""

import dataclasses

import pytest

from diptych.block_needs import ShippedBytes
from router.placement.cache_index import CacheIndex
from router.placement.claim import Asked
from router.placement.least_loaded import LeastLoaded
from router.placement.place import Place
from router.placement.placement import DecodeOnly, Paired, PrefillOnly, Why
from router.placement.query import Query
from router.placement.views import DecodeView, Pair, PrefillView, Snapshot, WorkerId
from tests.told_caches import holds

KEYS = tuple(bytes([i]) * 16 for i in range(8))
P1, P2, D1, D2 = (WorkerId(f"{name}:1", name) for name in ("p1", "p2", "d1", "d2"))
QUERY = Query(num_tokens=130, num_max_tokens=200, block_keys=KEYS)


def view_p(worker: WorkerId, pending: int = 0, **changes: object) -> PrefillView:
    view = PrefillView(worker=worker, num_pending_tokens=pending, max_model_len=1000)
    return dataclasses.replace(view, **changes)  # type: ignore[arg-type]


def view_d(worker: WorkerId, sequences: int = 0, **changes: object) -> DecodeView:
    view = DecodeView(
        worker=worker,
        num_sequences=sequences,
        max_model_len=1000,
        local_prefill=True,
        proven=frozenset({"p1", "p2"}),
    )
    return dataclasses.replace(view, **changes)  # type: ignore[arg-type]


BOTH = Snapshot((view_p(P1), view_p(P2)), (view_d(D1), view_d(D2)))


def test_a_worker_of_both_roles_computes_prompts_itself_where_that_is_least() -> None:
    """It ships nothing, what waits there counts once, and it is no pair with itself."""
    a, b = WorkerId("a:1", "a"), WorkerId("b:1", "b")
    apart = {"a": frozenset({"b"}), "b": frozenset({"a"})}

    def soft(pending_a: int, pending_b: int) -> Snapshot:
        return Snapshot(
            (view_p(a, pending_a), view_p(b, pending_b)),
            (
                view_d(a, proven=apart["a"], num_pending_tokens=pending_a),
                view_d(b, proven=apart["b"], num_pending_tokens=pending_b),
            ),
        )

    policy = made()
    assert policy.place(QUERY, soft(0, 50)) == DecodeOnly(a, Why.CHOICE)
    assert policy.place(QUERY, soft(50, 0)) == DecodeOnly(b, Why.CHOICE)
    held = QUERY._replace(on_prefill=a)
    assert policy.place(held, soft(0, 0)) == Paired(a, b), "a lease there is pulled from there"
    told = QUERY._replace(needs_prefill=True)
    assert isinstance(policy.place(told, soft(0, 0)), Paired), "a lease alone tells"
    failed = QUERY._replace(failed=frozenset({"a"}))
    assert policy.place(failed, soft(0, 50)) == DecodeOnly(b, Why.CHOICE)


def test_a_worker_of_both_roles_may_compute_what_all_others_failed() -> None:
    """Itself is none of those whose KV it could pull."""
    a = WorkerId("a:1", "a")
    full = view_p(a, has_runway=False)
    snapshot = Snapshot((full, view_p(P1)), (view_d(a, proven=frozenset({"p1"})),))
    failed = QUERY._replace(failed=frozenset({"p1"}))
    assert made().place(failed, snapshot) == DecodeOnly(a, Why.RECOMPUTE)


def made(
    *,
    below: int = 0,
    allow_local: bool = True,
    allow_recompute: bool = True,
) -> LeastLoaded:
    return LeastLoaded(
        CacheIndex(16),
        local_below_tokens=below,
        allow_local=allow_local,
        allow_recompute=allow_recompute,
    )


def test_least_loaded_of_each() -> None:
    snapshot = Snapshot((view_p(P1, 500), view_p(P2, 10)), (view_d(D1, 3), view_d(D2, 1)))
    assert made().place(QUERY, snapshot) == Paired(P2, D2)


def test_cached_prefix_outweighs_some_load() -> None:
    policy = made()
    holds(policy, P1, KEYS)
    holds(policy, D1, KEYS)
    busy = Snapshot((view_p(P1, 100), view_p(P2)), (view_d(D1, 1), view_d(D2)))
    assert policy.place(QUERY, busy) == Paired(P1, D1)
    busier = Snapshot((view_p(P1, 500), view_p(P2)), (view_d(D1, 9), view_d(D2)))
    assert policy.place(QUERY, busier) == Paired(P2, D2)
    policy.forget(P1)
    assert policy.place(QUERY, busy) == Paired(P2, D1)


ZONE_A, ZONE_B = Place("a"), Place("b")


@pytest.mark.parametrize("near", [P1, P2])
@pytest.mark.parametrize(
    ("here", "there"),
    [
        (Place("a", "rack 1"), Place("a", "rack 2")),
        (Place("", "rack 1"), Place("", "rack 2")),
        (ZONE_A, ZONE_B),
        (ZONE_A, Place()),
    ],
)
def test_among_equals_the_near_pair(near: WorkerId, here: Place, there: Place) -> None:
    prefills = tuple(view_p(p, place=here if p == near else there) for p in (P1, P2))
    alone = Snapshot(prefills, (view_d(D1, place=here),))
    assert made().place(QUERY, alone) == Paired(near, D1)
    both = Snapshot(prefills, (view_d(D1, place=here), view_d(D2, place=there)))
    chosen = made().place(QUERY, both)
    assert isinstance(chosen, Paired)
    if there == Place():
        assert chosen == Paired(near, D1)
    else:
        assert (chosen.prefill == near) == (chosen.decode == D1)


def test_a_domain_is_nearer_than_a_zone() -> None:
    prefills = (view_p(P1, place=Place("a", "1")), view_p(P2, place=Place("a", "2")))
    for domain, nearer in (("1", P1), ("2", P2)):
        snapshot = Snapshot(prefills, (view_d(D1, place=Place("b", domain)),))
        assert made().place(QUERY, snapshot) == Paired(nearer, D1)


def test_nearness_is_not_waited_for() -> None:
    """A few hundred tokens of work weigh more."""
    prefills = (view_p(P1, 300, place=ZONE_A), view_p(P2, place=ZONE_B))
    assert made().place(QUERY, Snapshot(prefills, (view_d(D1, place=ZONE_A),))) == Paired(P2, D1)


def test_what_a_link_really_moves_counts_more_than_a_name() -> None:
    fast = {"p1": 1e6, "p2": 1e9}
    decode = view_d(D1, place=ZONE_A, bytes_per_s=fast, shipped=ShippedBytes.even(1000.0))
    prefills = tuple(
        view_p(p, tokens_per_s=500.0, place=place) for p, place in ((P1, ZONE_A), (P2, ZONE_B))
    )
    assert made().place(QUERY, Snapshot(prefills, (decode,))) == Paired(P2, D1)


def test_of_layers_with_a_window_no_more_is_counted_than_is_shipped() -> None:
    """A prefix saves little shipping where most layers need the end of the prompt alone."""
    policy = made()
    holds(policy, D1, KEYS)
    windowed = ShippedBytes(((1e3, None), (9e3, 32)))
    assert windowed.of(130) == ShippedBytes.even(1e3).of(130) + ShippedBytes.even(9e3).of(32)

    def chosen(shipped: ShippedBytes) -> object:
        decodes = (
            view_d(worker, sequences, shipped=shipped, bytes_per_s={"p1": 1e7})
            for worker, sequences in ((D1, 1), (D2, 0))
        )
        return policy.place(QUERY, Snapshot((view_p(P1, tokens_per_s=1000),), tuple(decodes)))

    assert chosen(ShippedBytes.even(1e4)) == Paired(P1, D1)
    assert chosen(windowed) == Paired(P1, D2)


def test_only_proven_pairs() -> None:
    decodes = (view_d(D1, proven=frozenset()), view_d(D2, 50, proven=frozenset({"p2"})))
    snapshot = Snapshot((view_p(P1), view_p(P2, 900)), decodes)
    assert made().place(QUERY, snapshot) == Paired(P2, D2)
    assert made().place(QUERY, Snapshot((view_p(P1),), decodes)) is None


def test_failed_and_refused_are_left_out() -> None:
    query = QUERY._replace(failed=frozenset({"p1"}), refused=frozenset({"d1"}))
    assert made().place(query, BOTH) == Paired(P2, D2)
    pairs = frozenset({Pair("p1", "d1"), Pair("p2", "d1"), Pair("p1", "d2")})
    assert made().place(QUERY._replace(failed_pairs=pairs), BOTH) == Paired(P2, D2)


def test_too_small_workers_are_left_out() -> None:
    snapshot = Snapshot(
        (view_p(P1, max_model_len=199), view_p(P2)), (view_d(D1), view_d(D2, max_model_len=199))
    )
    assert made().place(QUERY, snapshot) == Paired(P2, D1)


def test_no_runway_waits() -> None:
    snapshot = Snapshot((view_p(P1, has_runway=False),), (view_d(D1),))
    assert made().place(QUERY, snapshot) is None


def test_one_half_is_fixed() -> None:
    assert made().place(QUERY._replace(on_prefill=P2), BOTH) == Paired(P2, D1)
    query = QUERY._replace(on_decode=D2, refused=frozenset({"p1"}))
    assert made().place(query, BOTH) == Paired(P2, D2)


def test_prefill_alone_for_one_token() -> None:
    query = QUERY._replace(num_max_tokens=131)
    assert made().place(query, BOTH) == PrefillOnly(P1)
    alone = Snapshot((view_p(P1),), ())
    assert alone.has_room_for([Asked(b"any")])
    assert made().place(query, alone) == PrefillOnly(P1)


def test_where_prefill_workers_are_busy_only_who_may_be_local_is_asked() -> None:
    """Of whom the policy would place somebody, by its prompt and by what decode workers cache."""
    policy = made(below=100)
    busy = tuple(view_p(worker, has_runway=False) for worker in (P1, P2))
    snapshot = Snapshot(busy, (view_d(D1), view_d(D2)))
    short = QUERY._replace(num_tokens=99)
    remote = dataclasses.replace(
        snapshot, decode=tuple(view_d(worker, local_prefill=False) for worker in (D1, D2))
    )
    for query, where, may_be_local in (
        (QUERY, snapshot, False),
        (short, snapshot, True),
        (short, remote, True),  # it is told so by its length alone
    ):
        assert policy.may_be_local(query, where) is may_be_local
        asked = Asked(b"any", may_be_local)
        is_placed = policy.place(query, where) is not None
        assert where.has_room_for([asked]) is is_placed
        assert dataclasses.replace(where, prefill=()).has_room_for([asked]) is (where is snapshot)
    holds(policy, P1, KEYS)
    assert not policy.may_be_local(QUERY, snapshot), "a prefill worker has it"
    holds(policy, D2, KEYS)
    assert policy.may_be_local(QUERY, snapshot)
    assert policy.place(QUERY, snapshot) is not None
    assert not policy.may_be_local(QUERY, remote)


def test_short_uncached_part_is_local() -> None:
    policy = made(below=64)
    assert policy.place(QUERY, BOTH) == Paired(P1, D1)
    holds(policy, D2, KEYS)  # 2 of 130 tokens are missing there
    assert policy.place(QUERY, BOTH) == DecodeOnly(D2, Why.CHOICE, 128)
    remote = Snapshot(BOTH.prefill, (view_d(D1), view_d(D2, local_prefill=False)))
    assert policy.place(QUERY, remote) == Paired(P1, D2)


def test_no_prefill_pool_is_always_local() -> None:
    policy = made(allow_local=False)
    without = Snapshot((), (view_d(D1),), has_prefill_pool=False)
    assert policy.place(QUERY, without) == DecodeOnly(D1, Why.CHOICE)


@pytest.mark.parametrize("allowed", [True, False])
def test_no_prefill_alive_is_local_where_allowed(allowed: bool) -> None:
    placement = made(allow_local=allowed).place(QUERY, Snapshot((), (view_d(D1),)))
    assert placement == (DecodeOnly(D1, Why.NO_PREFILL) if allowed else None)


@pytest.mark.parametrize("allowed", [True, False])
def test_none_that_anybody_can_pull_from_is_as_none_alive(allowed: bool) -> None:
    policy = made(allow_local=allowed)
    alone = view_d(D1, proven=frozenset(), unreadable=frozenset({P1.incarnation}))
    placement = policy.place(QUERY, Snapshot((view_p(P1),), (alone,)))
    assert placement == (DecodeOnly(D1, Why.NO_PREFILL) if allowed else None)
    not_yet = Snapshot((view_p(P1), view_p(P2)), (alone,))
    assert policy.place(QUERY, not_yet) is None


def test_what_needs_no_pair_is_placed_as_if_there_were_one() -> None:
    """A single token is the prefill worker's, and a short prompt the decode worker's own."""
    alone = view_d(D1, proven=frozenset(), unreadable=frozenset({P1.incarnation}))
    snapshot = Snapshot((view_p(P1),), (alone,))
    single = QUERY._replace(num_max_tokens=QUERY.num_tokens + 1)
    assert made().place(single, snapshot) == PrefillOnly(P1)
    short = Query(num_tokens=20, num_max_tokens=60)
    policy = made(allow_local=False, below=64)
    assert policy.place(short, snapshot) == DecodeOnly(D1, Why.CHOICE)


def test_what_cannot_be_pulled_from_keeps_no_failed_request_waiting() -> None:
    alone = view_d(D1, proven=frozenset({P2.incarnation}), unreadable=frozenset({P1.incarnation}))
    both = Snapshot((view_p(P1), view_p(P2)), (alone,))
    failed = QUERY._replace(failed_pairs=frozenset({Pair(P2.incarnation, D1.incarnation)}))
    assert made().place(failed, both) == DecodeOnly(D1, Why.RECOMPUTE)


@pytest.mark.parametrize("allowed", [True, False])
def test_all_prefill_failed_is_recomputed_where_allowed(allowed: bool) -> None:
    query = QUERY._replace(failed=frozenset({"p1", "p2"}), on_decode=D2)
    placement = made(allow_recompute=allowed).place(query, BOTH)
    assert placement == (DecodeOnly(D2, Why.RECOMPUTE) if allowed else None)


def test_refusals_do_not_make_it_local() -> None:
    query = QUERY._replace(refused=frozenset({"p1", "p2"}))
    assert made().place(query, BOTH) is None


def test_what_a_held_reservation_said_counts_and_not_the_memory() -> None:
    policy = made(below=64)
    holds(policy, D2, KEYS)
    assert policy.place(QUERY.on(D2, None), BOTH) == DecodeOnly(D2, Why.CHOICE, 128)
    assert policy.place(QUERY.on(D2, 0), BOTH) == Paired(P1, D2)
    assert policy.place(QUERY.on(D2, 96), BOTH) == DecodeOnly(D2, Why.CHOICE, 96)


def test_a_shared_prefix_does_not_defeat_balance() -> None:
    """65 sequences with one system prompt of 4,096 tokens, whose KV only the first worker has."""
    system = tuple(bytes([i % 256, i // 256]) * 8 for i in range(256))
    query = Query(num_tokens=4100, num_max_tokens=4200, block_keys=system)
    policy = LeastLoaded(
        CacheIndex(1000), local_below_tokens=64, allow_local=True, allow_recompute=True
    )
    counts = {D1: 0, D2: 0}
    for _ in range(65):
        views = tuple(view_d(d, n, max_num_seqs=64, max_model_len=9000) for d, n in counts.items())
        snapshot = Snapshot((view_p(P1, max_model_len=9000),), views)
        placement = policy.place(query, snapshot)
        assert isinstance(placement, Paired | DecodeOnly)
        counts[placement.decode] += 1
        holds(policy, placement.decode, system)
    assert max(counts.values()) <= 1.2 * min(counts.values()), counts


def test_never_more_sequences_than_a_worker_runs() -> None:
    policy = made()
    holds(policy, D1, KEYS)
    full = view_d(D1, 8, max_num_seqs=8)
    assert policy.place(QUERY, Snapshot((view_p(P1),), (full, view_d(D2, 99)))) == Paired(P1, D2)
    assert policy.place(QUERY, Snapshot((view_p(P1),), (full,))) is None
    assert not Snapshot((view_p(P1),), (full,)).has_room_for([Asked(b"any")])
    held = QUERY._replace(on_decode=D1)
    assert policy.place(held, Snapshot((view_p(P1),), (full,))) == Paired(P1, D1)


def test_routers_do_not_break_ties_alike() -> None:
    chosen = set()
    for router in range(32):
        policy = LeastLoaded(
            CacheIndex(16),
            local_below_tokens=0,
            allow_local=True,
            allow_recompute=True,
            router_incarnation=f"r{router}",
        )
        first = policy.place(QUERY, BOTH)
        assert policy.place(QUERY, BOTH) == first, "one router does"
        chosen.add(first)
    assert len(chosen) == 4


def test_of_a_large_pool_few_are_weighed_and_a_pair_is_found_still() -> None:
    prefills = tuple(view_p(WorkerId(f"p{i}:1", f"p{i}"), i) for i in range(100))
    lonely = frozenset({"p99"})  # far from the least loaded
    decodes = tuple(view_d(WorkerId(f"d{i}:1", f"d{i}"), proven=lonely) for i in range(100))
    placement = made().place(QUERY, Snapshot(prefills, decodes))
    assert isinstance(placement, Paired)
    assert placement.prefill.incarnation == "p99"


def test_what_workers_measured_decides() -> None:
    slow = Snapshot((view_p(P1, tokens_per_s=500), view_p(P2, 300, tokens_per_s=5000)), BOTH.decode)
    placement = made().place(QUERY, slow)
    assert isinstance(placement, Paired)
    assert placement.prefill == P2
    stepping = (view_d(D1, 4, step_s=0.2), view_d(D2, 5, step_s=0.05))
    assert made().place(QUERY, Snapshot((view_p(P1),), stepping)) == Paired(P1, D2)
    computing = (view_d(D1, num_pending_tokens=900), view_d(D2, 1))
    assert made().place(QUERY, Snapshot((view_p(P1),), computing)) == Paired(P1, D2)
    full = (view_d(D1, num_available_blocks=8), view_d(D2, 1, num_available_blocks=9))
    assert made().place(QUERY, Snapshot((view_p(P1),), full)) == Paired(P1, D2)


def test_a_prefill_worker_that_has_measured_nothing_counts_as_the_fastest() -> None:
    """A long queue at one that has is no reason to go there."""
    views = (view_p(P1, 5000, tokens_per_s=500), view_p(P2, 300))
    assert made().place(QUERY, Snapshot(views, (view_d(D1),))) == Paired(P2, D1)
    views = (view_p(P1, 200, tokens_per_s=500), view_p(P2, 300))
    assert made().place(QUERY, Snapshot(views, (view_d(D1),))) == Paired(P1, D1)


def test_what_one_ships_that_has_measured_nothing_costs_no_more_than_what_others_do() -> None:
    """Else it stays idle, and measures nothing, as long as others have little to do."""
    rates = {"p1": 1e9, "p2": 1e9}
    decode = view_d(D1, shipped=ShippedBytes.even(1000.0), bytes_per_s=rates)
    views = (view_p(P1, QUERY.num_tokens // 2, tokens_per_s=1000.0), view_p(P2))
    assert made().place(QUERY, Snapshot(views, (decode,))) == Paired(P2, D1)


def test_a_fast_link_makes_a_cached_prefix_weigh_less() -> None:
    policy = made()
    holds(policy, D1, KEYS)

    def linked_d(worker: WorkerId, sequences: int) -> DecodeView:
        return view_d(worker, sequences, shipped=ShippedBytes.even(1e4), bytes_per_s={"p1": 1e9})

    prefill = (view_p(P1, tokens_per_s=1000),)
    near = Snapshot(prefill, (view_d(D1, 1), view_d(D2)))
    assert policy.place(QUERY, near) == Paired(P1, D1)
    linked = Snapshot(prefill, (linked_d(D1, 1), linked_d(D2, 0)))
    assert policy.place(QUERY, linked) == Paired(P1, D2)


def test_an_explanation_has_the_chosen_pair_first_and_what_counted() -> None:
    policy = made()
    holds(policy, P2, KEYS[:4])
    rates = {"p1": 1000.0, "p2": 1000.0}
    snapshot = Snapshot(
        (view_p(P1, 500, tokens_per_s=100.0), view_p(P2, tokens_per_s=100.0)),
        (
            view_d(D1, 1, bytes_per_s=rates, shipped=ShippedBytes.even(10.0)),
            view_d(D2, 0, bytes_per_s=rates, shipped=ShippedBytes.even(10.0)),
        ),
    )
    placement = policy.place(QUERY, snapshot)
    assert placement == Paired(P2, D2)
    why = policy.explain(QUERY, snapshot, placement)
    assert [each.text() for each in why.prefill] == [
        "p2:1 chosen work_tokens=66 missing_tokens=66 predicted_s=0.6600",
        "p1:1 work_tokens=630 missing_tokens=130 predicted_s=6.3000",
    ]
    assert [each.text() for each in why.decode] == [
        "d2:1 chosen work_tokens=0 missing_tokens=130 sequences=0 predicted_s=1.3000",
        "d1:1 work_tokens=64 missing_tokens=130 sequences=1 predicted_s=1.3000",
    ]


def test_an_explanation_is_bounded_and_says_of_how_many_it_tells() -> None:
    workers = [WorkerId(f"d{i}:1", f"d{i}") for i in range(40)]
    snapshot = Snapshot((), tuple(map(view_d, workers)), has_prefill_pool=False)
    policy = made()
    placement = policy.place(QUERY, snapshot)
    assert isinstance(placement, DecodeOnly)
    why = policy.explain(QUERY, snapshot, placement)
    assert (why.prefill, why.num_prefill) == ((), 0)
    assert (len(why.decode), why.num_decode) == (8, 40)
    assert [each.is_chosen for each in why.decode] == [True, *[False] * 7]
    assert why.decode[0].address == placement.decode.address
    assert why.decode[0].predicted_s is None


def test_another_choice_is_beside_the_first_one_until_somebody_failed_it() -> None:
    policy = made()
    holds(policy, D2, KEYS)
    beside = QUERY._replace(beside=D2, block_size=16)
    assert policy.place(beside, BOTH) == DecodeOnly(D2, Why.CHOICE, 128)
    failed = beside._replace(failed=frozenset({"p1"}))
    assert isinstance(policy.place(failed, BOTH), Paired)


def test_what_lacks_room_alone_may_come() -> None:
    full = Snapshot(
        (view_p(P1, has_runway=False),), (view_d(D1, 4, max_num_seqs=4, num_available_blocks=0),)
    )
    refused = QUERY._replace(refused=frozenset({"p1", "d1"}))
    policy = made(allow_local=False)
    assert policy.place(refused, full) is None
    assert policy.may_come(refused, full)


@pytest.mark.parametrize(
    "lacking",
    [
        {"num_max_tokens": 1001},
        {"failed": frozenset({"p1"}), "needs_prefill": True},
        {"failed": frozenset({"d1"})},
    ],
)
def test_what_nobody_who_is_there_takes_may_not(lacking: dict[str, object]) -> None:
    """Longer than any worker, or by workers that broke something for it."""
    query = QUERY._replace(**lacking)  # type: ignore[arg-type]
    assert not made().may_come(query, Snapshot((view_p(P1),), (view_d(D1),)))
