"""Holders: spread by load, within budgets, outside the primary's domain; every time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relume.policies.checkpoints.placement import (
    Demand,
    Index,
    Placement,
    Site,
    Weights,
    choose,
    load,
    usable,
)

BLOCK = 100


@st.composite
def sites(draw: st.DrawFn) -> list[Site]:
    count = draw(st.integers(1, 12))
    return [
        Site(
            worker=f"w{i}",
            domain=draw(st.sampled_from(("d0", "d1", "d2", "d3"))),
            blocks=draw(st.integers(0, 9)),
            queue=draw(st.integers(0, 3)),
            budget_bytes=draw(st.sampled_from((0, 500, 1000, 10_000))),
            used_bytes=draw(st.integers(0, 1200)),
            family=draw(st.sampled_from(("f", "f", "g"))),
            alive=draw(st.sampled_from((True, True, True, False))),
            draining=draw(st.sampled_from((False, False, True))),
        )
        for i in range(count)
    ]


demands = st.builds(
    lambda at, blocks, wanted: (at, blocks, wanted),
    st.integers(0, 11),
    st.integers(0, 12),
    st.integers(1, 3),
)


def demand_of(all_sites: list[Site], shape: tuple[int, int, int]) -> Demand:
    at, blocks, wanted = shape
    primary = all_sites[at % len(all_sites)]
    return Demand(
        request="r",
        primary=primary.worker,
        domain=primary.domain,
        blocks=blocks,
        bytes=blocks * BLOCK,
        family=primary.family,
        wanted=wanted,
    )


@settings(max_examples=150, deadline=None)
@given(sites(), demands, st.sampled_from(("load_aware", "neighbour")))
def test_no_budget_is_exceeded_and_no_domain_shared_while_another_is_up(
    all_sites: list[Site], shape: tuple[int, int, int], policy: str
) -> None:
    demand = demand_of(all_sites, shape)
    by_name = {site.worker: site for site in all_sites}
    placement = choose(Index(all_sites), demand, policy)
    assert len(set(placement.holders)) == len(placement.holders) <= demand.wanted
    assert bool(placement.reason) == (len(placement.holders) < demand.wanted)
    elsewhere = [s for s in all_sites if usable(s) and s.domain != demand.domain]
    for name in placement.holders:
        holder = by_name[name]
        assert name != demand.primary
        assert usable(holder)
        assert holder.used_bytes + demand.bytes <= max(holder.budget_bytes, holder.used_bytes)
        assert holder.domain != demand.domain or not elsewhere
    assert choose(Index(list(reversed(all_sites))), demand, policy) == placement


@settings(max_examples=150, deadline=None)
@given(sites(), demands)
def test_the_tree_finds_what_a_scan_finds(
    all_sites: list[Site], shape: tuple[int, int, int]
) -> None:
    demand = demand_of(all_sites, (shape[0], shape[1], 1))
    open_ = [
        s
        for s in all_sites
        if usable(s) and s.domain != demand.domain and s.free_bytes >= demand.bytes
    ]
    index = Index(all_sites)
    placement = choose(index, demand)
    if open_:
        best = min(
            open_, key=lambda s: (s.family != demand.family, load(s, Weights()), s.domain, s.worker)
        )
        assert placement.holders == (best.worker,)
    elif any(usable(s) and s.domain != demand.domain for s in all_sites):
        assert placement == Placement((), placement.candidates, "budget")


@settings(max_examples=80, deadline=None)
@given(sites(), st.data())
def test_an_updated_index_is_a_new_index(all_sites: list[Site], data: st.DataObject) -> None:
    index = Index(all_sites)
    for _ in range(data.draw(st.integers(0, 5))):
        at = data.draw(st.integers(0, len(all_sites) - 1))
        old = all_sites[at]
        all_sites[at] = Site(
            worker=old.worker,
            domain=old.domain,
            blocks=data.draw(st.integers(0, 9)),
            queue=old.queue,
            budget_bytes=old.budget_bytes,
            used_bytes=data.draw(st.integers(0, 1200)),
            family=old.family,
            alive=data.draw(st.booleans()),
            draining=old.draining,
        )
        index.update(all_sites[at])
    demand = demand_of(all_sites, (0, 2, 2))
    assert choose(index, demand) == choose(Index(all_sites), demand)


def fleet(count: int = 4, **options: object) -> list[Site]:
    usual = {"blocks": 0, "queue": 0, "budget_bytes": 1 << 20, "used_bytes": 0}
    return [Site(worker=f"w{i}", domain=f"d{i}", **{**usual, **options}) for i in range(count)]  # type: ignore[arg-type]


def test_a_burst_of_one_primary_spreads_over_the_others() -> None:
    index = Index(fleet())
    held: dict[str, int] = {}
    for number in range(30):
        demand = Demand(request=f"r{number}", primary="w0", domain="d0", blocks=10, bytes=1000)
        (name,) = choose(index, demand).holders
        held[name] = held.get(name, 0) + 10
        site = index.site(name)
        assert site is not None
        index.update(
            Site(
                worker=name,
                domain=site.domain,
                blocks=site.blocks + 10,
                queue=0,
                budget_bytes=site.budget_bytes,
                used_bytes=site.used_bytes + 1000,
            )
        )
    assert held == {"w1": 100, "w2": 100, "w3": 100}


def test_neighbour_puts_all_on_one() -> None:
    index = Index(fleet())
    assert choose(
        index, Demand(request="r", primary="w1", domain="d1", blocks=1, bytes=1), "neighbour"
    ).holders == ("w2",)
    assert choose(
        index,
        Demand(request="r", primary="w3", domain="d3", blocks=1, bytes=1, wanted=2),
        "neighbour",
    ).holders == (
        "w0",
        "w1",
    )
    assert (
        choose(
            index, Demand(request="r", primary="w3", domain="d3", blocks=1, bytes=1), "none"
        ).reason
        == "policy"
    )


def test_two_holders_lie_in_two_domains() -> None:
    all_sites = [
        Site(worker="a", domain="x", blocks=0, queue=0, budget_bytes=1000, used_bytes=0),
        Site(worker="b", domain="y", blocks=1, queue=0, budget_bytes=1000, used_bytes=0),
        Site(worker="c", domain="y", blocks=2, queue=0, budget_bytes=1000, used_bytes=0),
        Site(worker="d", domain="z", blocks=9, queue=0, budget_bytes=1000, used_bytes=0),
    ]
    placement = choose(
        Index(all_sites), Demand(request="r", primary="a", domain="x", blocks=1, bytes=10, wanted=2)
    )
    assert placement.holders == ("b", "d"), "c is less loaded than d, but lies with b"
    three = choose(
        Index(all_sites), Demand(request="r", primary="a", domain="x", blocks=1, bytes=10, wanted=3)
    )
    assert three.holders == ("b", "d", "c"), "no third domain, so a second of one"


def test_the_queue_counts_as_well() -> None:
    sites_ = [
        Site(worker="a", domain="x", blocks=0, queue=0, budget_bytes=99, used_bytes=0),
        Site(worker="b", domain="y", blocks=0, queue=3, budget_bytes=99, used_bytes=0),
        Site(worker="c", domain="z", blocks=5, queue=0, budget_bytes=99, used_bytes=0),
    ]
    demand = Demand(request="r", primary="a", domain="x", blocks=1, bytes=1)
    assert choose(Index(sites_, Weights(1, 4)), demand).holders == ("c",)
    assert choose(Index(sites_, Weights(1, 1)), demand).holders == ("b",)


def test_one_domain_only_is_better_than_nothing() -> None:
    sites_ = [
        Site(worker=f"w{i}", domain="d", blocks=3 - i, queue=0, budget_bytes=1000, used_bytes=0)
        for i in range(3)
    ]
    assert choose(
        Index(sites_), Demand(request="r", primary="w2", domain="d", blocks=1, bytes=1)
    ).holders == ("w1",)
    alone = [Site(worker="w0", domain="d", blocks=0, queue=0, budget_bytes=1000, used_bytes=0)]
    assert (
        choose(
            Index(alone), Demand(request="r", primary="w0", domain="d", blocks=1, bytes=1)
        ).reason
        == "alone"
    )


def test_a_full_elsewhere_does_not_send_it_home() -> None:
    sites_ = [
        Site(worker="w0", domain="d", blocks=0, queue=0, budget_bytes=1000, used_bytes=0),
        Site(worker="w1", domain="d", blocks=0, queue=0, budget_bytes=1000, used_bytes=0),
        Site(worker="w2", domain="e", blocks=0, queue=0, budget_bytes=10, used_bytes=0),
    ]
    placement = choose(
        Index(sites_), Demand(request="r", primary="w0", domain="d", blocks=1, bytes=100)
    )
    assert placement.holders == () and placement.reason == "budget"


def test_an_unknown_policy_is_an_error() -> None:
    with pytest.raises(KeyError):
        choose(
            Index(fleet()),
            Demand(request="r", primary="w0", domain="d0", blocks=1, bytes=1),
            "best",
        )


def test_a_decision_among_many_workers_looks_at_few() -> None:
    """O(log W): the number of tree nodes read grows with the logarithm only."""

    class Counted(list):  # type: ignore[type-arg]
        reads = 0

        def __getitem__(self, at):  # type: ignore[no-untyped-def]
            Counted.reads += 1
            return super().__getitem__(at)

    reads = {}
    for count in (64, 4096):
        index = Index(fleet(count))
        index._trees = {family: Counted(tree) for family, tree in index._trees.items()}
        Counted.reads = 0
        choose(index, Demand(request="r", primary="w0", domain="d0", blocks=1, bytes=1))
        reads[count] = Counted.reads
    assert reads[4096] <= 2 * reads[64] + 10 < 150, reads


def test_a_host_that_drains_gets_no_new_checkpoints() -> None:
    def site(name: str, draining: bool = False) -> Site:
        return Site(
            worker=name, domain=f"d-{name}", blocks=0, queue=0, budget_bytes=9000, used_bytes=0,
            draining=draining,
        )  # fmt: skip

    demand = Demand(request="r", primary="w0", domain="d-w0", blocks=1, bytes=BLOCK, wanted=2)
    index = Index([site("w0"), site("w1", draining=True), site("w2")])
    for policy in ("load_aware", "neighbour"):
        assert choose(index, demand, policy).holders == ("w2",)
