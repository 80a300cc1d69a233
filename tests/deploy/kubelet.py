"""Runs pods of the chart as a kubelet does: start, probe, preStop, SIGTERM, at the end SIGKILL.

Each pod has an address of its own on this machine, so all listen on the chart's ports.
"""

import asyncio
import itertools
import os
import signal
from asyncio.subprocess import Process
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.deploy import here
from tests.unit.deploy.chart import ROOT, Pod

_PROBE_S = 5.0


def own_network() -> str:
    """In 127.0.0.0/8, of this test run alone."""
    return f"127.{64 + os.getpid() // 256 % 128}.{os.getpid() % 256}"


@dataclass
class RunningPod:
    """A pod that was started."""

    name: str
    pod: Pod
    ip: str
    log: Path
    process: Process

    @property
    def last_lines(self) -> str:
        """Of its log."""
        return "\n".join(self.log.read_text().splitlines()[-20:])

    @property
    def address(self) -> str:
        """Of its port that is called grpc."""
        return f"{self.ip}:{self.port('grpc')}"

    def port(self, name: str) -> int:
        """The number of the container's port of that name."""
        (found,) = [p for p in self.pod.container["ports"] if p["name"] == name]
        return int(found["containerPort"])

    async def passes(self, probe: str) -> bool:
        """Whether the container's probe of that name would pass now."""
        asked = self.pod.container[probe]["grpc"]
        async with grpc.aio.insecure_channel(f"{self.ip}:{asked['port']}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service=asked.get("service", ""))
            try:
                answer = await stub.Check(request, timeout=_PROBE_S)
            except grpc.aio.AioRpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@dataclass
class Kubelet:
    """Starts pods and ends them. Owned by the cluster.

    ``network`` is the first three parts of their addresses, all of which are this machine's.
    """

    folder: Path  # of logs and mounted files
    variables: Mapping[str, str]  # in every container
    network: str = field(default_factory=own_network)
    secrets: here.Secrets = field(default_factory=dict)  # those that pods mount
    _hosts: "itertools.count[int]" = field(default_factory=lambda: itertools.count(2))

    def ip(self, host: int) -> str:
        """An address that no other pod has."""
        return f"{self.network}.{host}"

    async def start(self, name: str, pod: Pod, settings: Mapping[str, object]) -> RunningPod:
        """Start its container; whether it gets ready is asked later."""
        ip = self.ip(next(self._hosts))
        folder = self.folder / f"{name}-{ip}"
        args = [
            arg.replace("--listen=0.0.0.0", f"--listen={ip}")
            for arg in here.with_mounts(pod, settings, folder, self.secrets)
        ]
        given = {**self.variables, "POD_NAME": name, "NODE_NAME": "here"}
        path = folder / "log"
        with path.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *here.command(args), env=here.environment(pod, given), cwd=ROOT, stderr=log
            )
        return RunningPod(name, pod, ip, path, process)

    async def stop(self, running: RunningPod) -> int:
        """End it as Kubernetes ends a pod; its exit code.

        Raises TimeoutError: it took longer than its grace period. Raises AssertionError: it had
        ended by itself.
        """
        try:
            async with asyncio.timeout(running.pod.spec["terminationGracePeriodSeconds"]):
                if "lifecycle" in running.pod.container:
                    hook = running.pod.container["lifecycle"]["preStop"]["exec"]["command"]
                    await (await asyncio.create_subprocess_exec(*hook)).wait()
                code = running.process.returncode
                assert code is None, f"{running.name} had ended with {code}: {running.last_lines}"
                running.process.send_signal(signal.SIGTERM)
                return await running.process.wait()
        finally:
            await self.kill(running)

    async def kill(self, running: RunningPod) -> None:
        """Leave nothing of it. Idempotent."""
        if running.process.returncode is None:
            running.process.kill()
            await running.process.wait()
