"""Of the files that a process may have open clients get shares."""

import resource

import pytest

from diptych.rpc.connections import GRPC_SHARE, HTTP_SHARE, PROBES_SHARE, most_connections


@pytest.mark.parametrize("max_files", [64, 1024, 2**20])
def test_clients_leave_files_to_all_else(monkeypatch: pytest.MonkeyPatch, max_files: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (max_files, resource.RLIM_INFINITY))
    shares = [most_connections(share) for share in (HTTP_SHARE, GRPC_SHARE, PROBES_SHARE)]
    assert sum(shares) <= max_files * 13 // 16
    assert min(shares) > 0


def test_where_files_have_no_bound_connections_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda _: (endless, endless))
    assert most_connections(GRPC_SHARE) == 2**20
