"""Where a worker runs, and how near two are to each other. Pure."""

from typing import NamedTuple

# Of what shipping to another place costs, in one NVLink domain and in one zone.
_DOMAIN_RATIO = 7 / 8
_ZONE_RATIO = 15 / 16


class Place(NamedTuple):
    """Names that are compared and nothing else; empty: not known."""

    zone: str = ""
    nvlink_domain: str = ""

    def over(self, other: "Place") -> "Place":
        """This, and where it says nothing what the other says."""
        return Place(*(mine or theirs for mine, theirs in zip(self, other, strict=True)))


NOWHERE = Place()


def distance_ratio(one: Place, other: Place) -> float:
    """How much of the cost of shipping counts: less in one zone, least in one NVLink domain.

    Little less: nearness decides among pairs that are otherwise alike, and is not waited for.
    What a link really moves is measured, and counts beside this.
    """
    if one.nvlink_domain and one.nvlink_domain == other.nvlink_domain:
        return _DOMAIN_RATIO
    if one.zone and one.zone == other.zone:
        return _ZONE_RATIO
    return 1.0
