"""Channels between the processes of a cluster, and the options that both of their ends share.

Liveness: HTTP/2 keepalive finds a dead or stopped process in about three
seconds, but only with all of the options below set (measured; a misspelt option
is silently ignored). It does not prove that the event loop or the engine behind
it is alive: heartbeats do.
"""

from ipaddress import ip_address
from typing import TypeAlias

import grpc

from diptych.timers import Timers

ChannelOptions: TypeAlias = list[tuple[str, int]]

Lock: TypeAlias = tuple[grpc.ChannelCredentials, str]
"""What opens a peer's lock, and the name that the peer's certificate has to have; empty: its own
address."""

MAX_MESSAGE_BYTES = 16 * 2**20

# What a channel keeps of a call until its peer answers, to make it again where no server looked at
# it: its connection came of age as it began. gRPC's own 256 KiB let long prompts get lost then.
_KEPT_BYTES = MAX_MESSAGE_BYTES + 2**16  # with its metadata

_NEVER_MS = 2**31 - 1  # gRPC's word for it

_SCHEMES = ("dns:", "ipv4:", "ipv6:")

_TIMERS = Timers()
SIZE_OPTIONS: ChannelOptions = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]


def open_channel(
    address: str, timers: Timers = _TIMERS, lock: Lock | None = None, *, by_proxy: bool = False
) -> grpc.aio.Channel:
    """Open a channel to a peer process of the cluster. The caller closes it.

    ``by_proxy``: by the one that the environment names (``http_proxy``), as clients may have to,
    where neither ``no_proxy`` has the address nor it is this machine's own: a proxy would look
    for that on its own machine.
    """
    options: list[tuple[str, int | str]] = [
        *keepalive_options(timers.keepalive_s, timers.keepalive_answer_s),
        *SIZE_OPTIONS,
        ("grpc.per_rpc_retry_buffer_size", _KEPT_BYTES),
        # how long an attempt to connect may take: a peer on a busy machine answers late
        ("grpc.min_reconnect_backoff_ms", 2000),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        # else half an hour without a call ends the connection, and who watches it takes that for
        # its peer's end: a pair would have to be proven again
        ("grpc.client_idle_timeout_ms", _NEVER_MS),
        # a peer that comes back may have another address under its name
        ("grpc.dns_min_time_between_resolutions_ms", 1000),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", int(by_proxy and not is_loopback(address))),
    ]
    if lock is None:
        return grpc.aio.insecure_channel(address, options=options)
    credentials, name = lock
    if name:
        options.append(("grpc.ssl_target_name_override", name))
    return grpc.aio.secure_channel(address, credentials, options=options)


def is_loopback(address: str) -> bool:
    """Whether what gRPC would connect to, host:port, is this machine's own by its name."""
    target = address
    for scheme in _SCHEMES:
        target = target.removeprefix(scheme)
    target = target.rpartition("/")[2]  # behind an authority
    if target.startswith("["):
        host = target[1:].partition("]")[0]
    else:
        host = target if target.count(":") > 1 else target.partition(":")[0]
    try:
        return host.lower() == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def keepalive_options(interval_s: float, answer_s: float) -> ChannelOptions:
    """Ping each ``interval_s``, call or no call; broken without an answer for ``answer_s``."""
    answer_ms = int(1000 * answer_s)
    return [
        ("grpc.keepalive_time_ms", int(1000 * interval_s)),
        ("grpc.keepalive_timeout_ms", answer_ms),
        ("grpc.http2.ping_timeout_ms", answer_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
