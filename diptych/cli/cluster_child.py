"""One role's process of a local cluster: its output as lines, and where it listens."""

import json
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from diptych import settings
from diptych.child_process import ChildProcess, module_command

TAIL_LINES = 20

# (name of the child, one line of its output)
Show = Callable[[str, str], None]


class ChildFailedError(Exception):
    """A child ended by itself; ``tail`` holds its last lines."""

    def __init__(self, name: str, code: int, tail: Sequence[str]) -> None:
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        super().__init__(f"{name} {how}")
        self.name, self.code, self.tail = name, code, list(tail)


class Child:
    """One role's process. Its addresses are known once it wrote its port file."""

    def __init__(
        self,
        name: str,
        module: str,
        args: Sequence[str],
        folder: Path,
        secret: tuple[str, str] | None = None,
    ) -> None:
        """``secret`` is a setting, by its variable: arguments are there for everybody to read."""
        self.name = name
        self.address = ""
        self.metrics_address = ""
        self.http_address = ""
        """Of a router; empty where it serves gRPC alone."""
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        port_file = folder / f"{name}.json"
        command = [*module_command(module), "--metrics-port", "0", *args]  # which may say another
        command += ["--port-file", str(port_file), "--stop-with-stdin"]
        environment = None
        if secret is not None:
            variable, value = secret
            environment = {**settings.environment_without(variable), variable: value}
        self._process = ChildProcess(command, port_file, environment=environment, is_read=True)

    async def start(self) -> None:
        """Start it; once."""
        await self._process.start()

    async def follow(self, show: Show) -> int:
        """Show its lines until it has ended; its exit code (negative: the signal)."""
        rest = b""
        while chunk := await self._process.output.read(65536):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._show(line, show)
        if rest:
            self._show(rest, show)
        return await self._process.ended()

    async def listening(self) -> None:
        """Wait until it accepts connections."""
        ports = await self._process.listening()
        self.address, self.metrics_address = ports["address"], ports["metrics_address"]
        self.http_address = ports.get("http_address", "")

    async def stop(self, timeout_s: float) -> None:
        """Ask it to end; end it after ``timeout_s``."""
        await self._process.stop(timeout_s)

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def _show(self, raw: bytes, show: Show) -> None:
        line = readable(raw.decode(errors="replace"))
        self.tail.append(line)
        show(self.name, line)


def readable(line: str) -> str:
    """A child's JSON log line as text: the message, then its fields."""
    try:
        fields = json.loads(line)
        level, message = fields.pop("level"), fields.pop("message")
    except (ValueError, AttributeError, KeyError, TypeError):
        return line
    for name in ("time", "service", "logger"):
        fields.pop(name, None)
    exception = fields.pop("exception", "")
    details = "".join(f" {name}={value}" for name, value in fields.items())
    mark = "" if level in ("info", "debug") else f"{level}: "
    return f"{mark}{message}{details}" + (f"\n{exception}" if exception else "")
