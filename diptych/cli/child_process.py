"""One role's process, started and followed by another: its output, addresses, end."""

import asyncio
import json
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

TAIL_LINES = 20
_POLL_S = 0.1

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

    def __init__(self, name: str, module: str, args: Sequence[str], folder: Path) -> None:
        self.name = name
        self.address = ""
        self.metrics_address = ""
        self.http_address = ""
        """Of a router; empty where it serves gRPC alone."""
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._port_file = folder / f"{name}.json"
        self._command = [sys.executable, "-m", module, *args]
        self._command += ["--metrics-port", "0", "--port-file", str(self._port_file)]
        self._command += ["--stop-with-stdin"]
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Process id, once started."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start it in a session of its own, so that Ctrl-C reaches only the parent."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )

    async def follow(self, show: Show) -> int:
        """Show its lines until it has ended; its exit code (negative: the signal)."""
        assert self._process is not None
        assert self._process.stdout is not None
        rest = b""
        while chunk := await self._process.stdout.read(65536):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._show(line, show)
        if rest:
            self._show(rest, show)
        return await self._process.wait()

    async def listening(self) -> None:
        """Wait until it accepts connections."""
        while not self._port_file.exists():  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(_POLL_S)
        ports = json.loads(self._port_file.read_text())
        self.address, self.metrics_address = ports["address"], ports["metrics_address"]
        self.http_address = ports.get("http_address", "")

    async def stop(self, timeout_s: float) -> None:
        """Ask it to end; end it after ``timeout_s``."""
        if self._process is None:
            return
        try:
            self._process.terminate()
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except ProcessLookupError:
            await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None and self._process.returncode is None:
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
