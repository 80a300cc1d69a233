"""Wires that can be cut and a proxy that answers errors: what stands between two processes."""

import itertools
import json
import os
import subprocess
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import grpc

ANY_PORT = "127.0.0.1:0"
_CHANNEL = [  # it notices a silent worker, and one that is there again, as a router does
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]
_number_of_wires = itertools.count()  # laid by this process


class Proxy(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Passes every RPC on to one worker, byte for byte, and breaks a method when told.

    Threads of its own, so it works whatever the test's event loop does.
    """

    def __init__(self, target: str, host: str = "127.0.0.1") -> None:
        self._host = host
        self.address = f"{host}:0"
        self._channel = grpc.insecure_channel(target, _CHANNEL)
        self._server: grpc.Server | None = None
        self._lock = threading.Lock()
        self._open: dict[str, set[Any]] = defaultdict(set)
        self._told: dict[Any, grpc.StatusCode] = {}  # by open call
        self._next: dict[str, grpc.StatusCode] = {}  # by method
        self._mute: frozenset[str] = frozenset()  # methods whose ends are told to nobody
        self._is_heard = threading.Event()
        self._is_heard.set()

    def listen(self) -> None:
        """At the same address every time."""
        server = grpc.server(
            ThreadPoolExecutor(32), handlers=[self], options=[("grpc.so_reuseport", 0)]
        )
        port = server.add_insecure_port(self.address)
        assert port, f"{self.address} is taken"
        self.address = f"{self._host}:{port}"
        server.start()
        self._server = server

    def refuse(self) -> None:
        """Nothing listens at the address any more; what was open is broken."""
        if self._server is not None:
            self._server.stop(None).wait()
            self._server = None

    def close(self) -> None:
        self.refuse()
        self._channel.close()

    def answer(self, method: str, code: grpc.StatusCode) -> None:
        """End the calls of ``method`` that are open with ``code``, and the next one at once."""
        with self._lock:
            calls = list(self._open[method])
            self._told.update(dict.fromkeys(calls, code))
            self._next[method] = code
        for call in calls:
            call.cancel()

    def num_open(self, method: str) -> int:
        return len(self._open[method])

    def mute(self, *methods: str) -> None:
        """Pass on no end of these methods' calls: who made them finds them silent."""
        self._mute = frozenset(methods)
        self._is_heard.clear()

    def obey(self) -> None:
        """Pass everything on again."""
        self._next.clear()
        self._mute = frozenset()
        self._is_heard.set()

    def service(self, details: Any) -> Any:
        """See grpc.GenericRpcHandler: one handler for all methods."""
        method = details.method.rpartition("/")[2]

        def forward(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            with self._lock:
                code = self._next.pop(method, None)
                if code is not None:
                    context.abort(code, "as told")
                metadata = [pair for pair in details.invocation_metadata if pair[0] != "user-agent"]
                stub: Any = self._channel.stream_stream
                call = stub(details.method)(requests, metadata=metadata)
                self._open[method].add(call)
            context.add_callback(call.cancel)
            try:
                yield from call
            except grpc.RpcError:
                if method in self._mute:
                    self._is_heard.wait()
                code = self._told.get(call)
                if code is not None:
                    context.abort(code, "as told")
                context.set_trailing_metadata(call.trailing_metadata())
                context.abort(call.code(), call.details())
            finally:
                with self._lock:
                    self._open[method].discard(call)
                    self._told.pop(call, None)

        return grpc.stream_stream_rpc_method_handler(forward)


class Namespace:
    """A network namespace without a name: it ends with this object, or with this process."""

    def __init__(self) -> None:
        """Raises PermissionError where this process may not, FileNotFoundError without unshare."""
        self._holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo; exec cat"],  # until its input ends
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.pid = self._holder.pid
        self.prefix = ["nsenter", f"--net=/proc/{self.pid}/ns/net"]
        assert self._holder.stdout is not None
        if not self._holder.stdout.readline():
            self.close()
            raise PermissionError(f"unshare ended with {self._holder.returncode}")

    def ip(self, command: str) -> None:
        """Raises CalledProcessError."""
        _run(" ".join([*self.prefix, "ip", command]))

    def close(self) -> None:
        self._holder.communicate()


class Wires:
    """A prefill and a decode worker in network namespaces, a wire on each of the three links.

    In the middle of each wire is a switch whose ports go down when it is cut, so neither
    side is told anything. The router is in the namespace of the test. The switches have a
    namespace too: with it, whatever ends the test, every wire goes.
    """

    links = ("prefill", "decode", "fetch")

    def __init__(self, switches: Namespace, workers: dict[str, Namespace]) -> None:
        self._switches, self._workers = switches, workers
        # Interface names have 15 characters at the most.
        self._tag = f"d{os.getpid()}.{next(_number_of_wires)}"
        self._net = _free_net()
        self.addresses = {"prefill": f"{self._net}.1.2", "decode": f"{self._net}.2.2"}
        self.own_address = (
            f"{self._net}.2.1"  # of the test's namespace, seen from the decode worker
        )

    def prefix(self, role: str) -> list[str]:
        """The command that executes another one where the ``role``'s worker lives.

        UCX looks for interfaces in /sys, which shows those of where it was mounted.
        """
        mounted = ("unshare", "--mount", "sh", "-c", 'mount -t sysfs sysfs /sys && exec "$0" "$@"')
        return [*self._workers[role].prefix, *mounted]

    def cut(self, link: str) -> None:
        self._ports(link, "down")

    def mend(self, link: str) -> None:
        self._ports(link, "up")

    def refuse_fetch(self) -> None:
        """At the prefill worker's address the decode worker finds itself, where nobody listens."""
        self._workers["decode"].ip(f"addr add {self.addresses['prefill']}/32 dev lo")

    def accept_fetch(self) -> None:
        self._workers["decode"].ip(f"addr del {self.addresses['prefill']}/32 dev lo")

    def lay(self) -> None:
        """Raises CalledProcessError where this process may not."""
        for worker in self._workers.values():
            worker.ip("link set lo up")
        for number, link in enumerate(self.links, start=1):
            self._switches.ip(f"link add {link} type bridge")
            self._switches.ip(f"link set {link} up")
            if link == "fetch":
                for role, host in (("prefill", 2), ("decode", 3)):
                    self._plug(link, role, f"{self._net}.{number}.{host}")
            else:
                self._plug_router(link, f"{self._net}.{number}.1")
                self._plug(link, link, self.addresses[link])
        self._workers["decode"].ip(f"route add {self.addresses['prefill']}/32 dev fetch")

    def _plug_router(self, link: str, address: str) -> None:
        own, port = f"{self._tag}{link[0]}", _port(link, "router")
        _run(f"ip link add {own} type veth peer name {port} netns {self._switches.pid}")
        self._switches.ip(f"link set {port} master {link} up")
        _run(f"ip addr add {address}/24 dev {own}")
        _run(f"ip link set {own} up")

    def _plug(self, link: str, role: str, address: str) -> None:
        worker, port = self._workers[role], _port(link, role)
        self._switches.ip(f"link add {port} type veth peer name {link} netns {worker.pid}")
        self._switches.ip(f"link set {port} master {link} up")
        worker.ip(f"addr add {address}/24 dev {link}")
        worker.ip(f"link set {link} up")

    def _ports(self, link: str, state: str) -> None:
        for role in ("prefill", "decode") if link == "fetch" else (link,):
            self._switches.ip(f"link set {_port(link, role)} {state}")


@contextmanager
def wires() -> Iterator[Wires | None]:
    """None where network namespaces cannot be made: not root, or not Linux."""
    with ExitStack() as undo:
        laid: Wires | None
        try:
            switches, prefill, decode = (undo.enter_context(closing(Namespace())) for _ in range(3))
            laid = Wires(switches, {"prefill": prefill, "decode": decode})
            laid.lay()
        except (subprocess.CalledProcessError, OSError):
            undo.close()
            laid = None
        yield laid


def _free_net() -> str:
    """The first half of addresses that no interface here has, such as ``10.200``."""
    shown = _run("ip -json -4 addr show")
    taken = {info["local"] for interface in json.loads(shown) for info in interface["addr_info"]}
    nets = (f"10.{number}" for number in range(200, 250))
    return next(net for net in nets if not any(local.startswith(f"{net}.") for local in taken))


def _port(link: str, role: str) -> str:
    """The switch's end of a wire to ``role``."""
    return f"{link}-{role}"


def _run(command: str) -> str:
    done = subprocess.run(command.split(), check=True, capture_output=True, text=True)
    return done.stdout
