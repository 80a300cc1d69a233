"""The first pod of each role as a process of this machine, found by DNS.

Addresses become ports of the loopback address, which a name server of its own tells for
the pools' names.
"""

import json
import signal
import socket
import subprocess
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tests.deploy import here
from tests.deploy.name_server import NameServer
from tests.unit.deploy.chart import NAMESPACE, ROOT, Pod, pods, settings_text

_PORTS = {"router": 50051, "prefill": 50061, "decode": 50061}


@dataclass
class Process:
    """A serving pod's container, running."""

    pod: Pod
    address: str
    child: subprocess.Popen[bytes]

    def passes(self, probe: str) -> bool:
        """Whether the container's probe of that name would pass now."""
        service = self.pod.container[probe]["grpc"].get("service", "")
        asked = ["health", f"--address={self.address}", f"--service={service}"]
        return here.run(asked, timeout_s=20).returncode == 0

    def stop(self) -> int:
        """End it as Kubernetes does; its exit code. Raises TimeoutExpired: it took too long."""
        self.child.send_signal(signal.SIGTERM)
        return self.child.wait(self.pod.spec["terminationGracePeriodSeconds"])


class LocalPods:
    """The pods of one rendering, each pool's first. A context manager; ends all that it started."""

    def __init__(self, rendering: str, folder: Path) -> None:
        self._folder = folder
        self._pods = {pod.command: pod for pod in pods(rendering)}
        self._addresses = {role: f"127.0.0.1:{_free_port()}" for role in _PORTS}
        self._metrics_ports = {role: _free_port() for role in _PORTS}
        self._names = NameServer(
            {self._service(role): self._addresses[role] for role in ("prefill", "decode")}
        )
        self.processes: dict[str, Process] = {}

    def __enter__(self) -> Self:
        self._names.start()
        for role in _PORTS:
            self.processes[role] = self._start(self._pods[role])
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.child.kill()
            process.child.wait()
        self._names.stop()

    def test(self) -> here.Done:
        """Run what `helm test` runs, as a new pod."""
        pod, uid = self._pods["generate"], str(uuid.uuid4())
        args = [str(arg).replace("$(POD_UID)", uid) for arg in pod.container["args"]]
        return here.run([self._here(arg) for arg in args], timeout_s=100)

    def log(self, role: str) -> str:
        """What the container wrote."""
        return (self._folder / f"{role}.log").read_text()

    def _start(self, pod: Pod) -> Process:
        role = pod.command
        settings = json.loads(settings_text(pod))
        if role == "router":
            settings["dns"]["server"] = self._names.address
        args = []
        for arg in here.with_mounts(pod, settings, self._folder / role):
            if arg.startswith("--listen="):
                arg = f"--listen={self._addresses[role]}"
            elif arg.startswith("--metrics-port="):
                arg = f"--metrics-port={self._metrics_ports[role]}"
            elif arg.startswith("--http-port="):
                arg = "--http-port=0"
            args.append(arg)
        with (self._folder / f"{role}.log").open("wb") as log:
            child = subprocess.Popen(
                here.command(args), env=here.environment(pod, {}), cwd=ROOT, stderr=log
            )
        return Process(pod, self._addresses[role], child)

    def _here(self, text: str) -> str:
        """With the router's address, and those of metrics, as they are here."""
        if text.startswith("--expect-trace="):
            places = [f"127.0.0.1:{port}" for port in self._metrics_ports.values()]
            return f"--expect-trace={','.join(places)}"
        router = self._pods["router"].manifest["metadata"]["name"]
        return text.replace(f"{router}:{_PORTS['router']}", self._addresses["router"])

    def _service(self, role: str) -> str:
        """The name that DNS has for the port of a pool's headless service."""
        service = self._pods[role].manifest["spec"]["serviceName"]
        return f"_grpc._tcp.{service}.{NAMESPACE}.svc.cluster.local."


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
