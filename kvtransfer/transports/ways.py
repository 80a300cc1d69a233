"""Which ways there are from a source's pool to a reader's, by where the two lie. Pure.

Both sides decide by this alone, so they agree. It says what is possible; that it works, a
pair proves, and measures. Facts that shape it: UCX copies host memory between two processes by
cross-memory attach and device memory by CUDA IPC, on one machine, and either by RDMA. What none
of these reaches it reads all the same, by messages over TCP, slowly, with the help of the process
that is read, which a dying reader can crash: so there nothing is read, but staged.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from diptych.v1.kv_source_pb2 import PoolPlace

HOST, DEVICE = "DRAM", "VRAM"
# Of CUDA IPC, bytes/s: several times what reads over TCP reach, a tenth of what a card copies.
# Nothing else tells the two apart: UCX does not say, and neither is over when it is posted.
_LEAST_OVER_CUDA_IPC = 4e9
_NAMES_ALL = {"all"}
_OF_RDMA = {"ib", "rc", "rc_v", "rc_x", "rc_verbs", "rc_mlx5", "dc", "dc_x", "dc_mlx5"} | _NAMES_ALL
_OF_CUDA_IPC = {"cuda", "cuda_ipc"} | _NAMES_ALL
_OF_CUDA_COPY = {"cuda", "cuda_copy"} | _NAMES_ALL


class Way(NamedTuple):
    """How blocks get from one pool into the other over one transport."""

    text: str  # both memories, and where they are staged; for people
    staged_at_source: bool = False
    least_bytes_per_s: float = 0.0  # where it is slower, the blocks went another way


class NoWay(NamedTuple):
    """There is none: ``why`` names both memories."""

    why: str


def way_between(transport: str, source: PoolPlace, reader: PoolPlace) -> Way | NoWay:
    """The one way over ``transport``, if there is one."""
    for place in (source, reader):
        if _kind(place) not in (HOST, DEVICE):
            return NoWay(f"{_both(source, reader)}: one is of a kind that is not known")
    return _WAYS[transport](source, reader)


def common_ways(
    names: Iterable[str], source: PoolPlace, reader: PoolPlace
) -> tuple[list[str], list[str]]:
    """Those of these transports by which there is a way; and why there is none by the others."""
    possible, refused = [], []
    for name in names:
        way = way_between(name, source, reader)
        if isinstance(way, NoWay):
            refused.append(f"{name}: {way.why}")
        else:
            possible.append(name)
    return possible, refused


def shortfalls(names: Iterable[str], source: PoolPlace, reader: PoolPlace) -> str:
    """Why there is no way over these, for people; between host memories nothing is amiss."""
    if not (_is_device(source) or _is_device(reader)):
        return ""
    return "; ".join(common_ways(names, source, reader)[1])


def _direct(source: PoolPlace, reader: PoolPlace) -> Way | NoWay:
    """nixl reads one pool into the other itself."""
    places = (source, reader)
    both = _both(source, reader)
    if not any(map(_is_device, places)):
        return Way(f"{both}, direct")
    device_tls = [set(place.ucx_tls) for place in places if _is_device(place)]
    has_rdma = all(_OF_RDMA & set(place.ucx_tls) for place in places)
    if has_rdma and all(_OF_CUDA_COPY & tls for tls in device_tls):
        return Way(f"{both}, direct by RDMA")
    is_one_machine = source.machine == reader.machine != ""
    if is_one_machine and len(device_tls) == 2 and all(_OF_CUDA_IPC & tls for tls in device_tls):
        return Way(f"{both}, direct by CUDA IPC", least_bytes_per_s=_LEAST_OVER_CUDA_IPC)
    return NoWay(
        f"{both}: neither RDMA nor CUDA IPC reaches from one to the other (UCX transports at the "
        f"source {_tls(source)}, at the reader {_tls(reader)})"
    )


def _staged(source: PoolPlace, reader: PoolPlace) -> Way | NoWay:
    """nixl reads between host memories, beside each pool that is on a device."""
    both = _both(source, reader)
    at_source, at_reader = _is_device(source), _is_device(reader)
    if not (at_source or at_reader):
        return NoWay(f"{both}: there is nothing to stage")
    sides = " and ".join(
        name for name, staged in (("source", at_source), ("reader", at_reader)) if staged
    )
    return Way(f"{both}, staged at the {sides}", staged_at_source=at_source)


def _host_only(source: PoolPlace, reader: PoolPlace) -> Way | NoWay:
    both = _both(source, reader)
    if _is_device(source) or _is_device(reader):
        return NoWay(f"{both}: it knows host memory only")
    return Way(f"{both}, direct")


def _in_messages(source: PoolPlace, reader: PoolPlace) -> Way:
    return Way(f"{_both(source, reader)}, in messages")


_WAYS: Mapping[str, Callable[[PoolPlace, PoolPlace], Way | NoWay]] = {
    "nixl": _direct,
    "staged": _staged,
    "ucxx": _host_only,
    "inline": _in_messages,
}


def _kind(place: PoolPlace) -> str:
    return place.memory_kind or HOST


def _is_device(place: PoolPlace) -> bool:
    return _kind(place) == DEVICE


def _named(place: PoolPlace) -> str:
    return f"{DEVICE} of device {place.device_id}" if _is_device(place) else _kind(place)


def _both(source: PoolPlace, reader: PoolPlace) -> str:
    return f"{_named(source)} at the source, {_named(reader)} at the reader"


def _tls(place: PoolPlace) -> str:
    return ",".join(place.ucx_tls) or "none"
