"""What a server's memory grows by where clients leave their answers unread.

    .venv/bin/python -m tests.bench.unread_answers [--clients 500] [--answer-bytes 8388608]
        [--max-untaken-bytes 536870912] [--tls]

The HTTP server of the router in a process of its own, whose every answer is so long, and clients
that ask for one each, one after the other, and read nothing but its first byte. A bound that is
not reached says what there would be without it.
"""

import argparse
import json
import logging
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import psutil
import trustme
import uvloop

from diptych.rpc.identity import Certificate
from diptych.timers import Timers
from router.frontend.http.exchange import BodyRoom, Exchange
from router.frontend.http.posted import Posted
from router.frontend.http.server import HttpServer, bind, bounds_of
from router.untaken import DEFAULT_BYTES, Cut, Untaken
from tests.bench.environment import environment

_CHAIN: Final = "tls.crt"
_KEY: Final = "tls.key"
_REQUEST: Final = (
    b"POST / HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
)
_SETTLES_S: Final = 2.0
_BODY_BYTES: Final = 2**20  # of a request
_WRITE_S: Final = 600.0  # nobody is given up by its own patience


async def _serve(options: argparse.Namespace, folder: Path) -> None:
    """Tells its port first, then how many were cut off, each time that there is one more."""
    num_cut = 0

    def count(cut: Cut) -> None:
        nonlocal num_cut
        num_cut += 1
        (folder / "cut").write_text(str(num_cut))

    async def tell(exchange: Exchange, data: bytes) -> None:
        await exchange.send_json({"said": "x" * options.answer_bytes})

    bound = Untaken(time.monotonic, options.max_untaken_bytes, count)
    room, timers = BodyRoom(_BODY_BYTES, _BODY_BYTES, _WRITE_S), Timers()
    certificate = Certificate("tls", folder / _CHAIN, folder / _KEY) if options.tls else None
    bounds = bounds_of(_BODY_BYTES, _WRITE_S)
    server = HttpServer(
        Posted(tell, room), bind("127.0.0.1", 0, timers), bounds, bound, certificate
    )
    sys.stdout.write(f"{server.port}\n")
    sys.stdout.flush()
    await server.serve()


def _asking(port: int, trusting: ssl.SSLContext | None) -> socket.socket:
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.connect(("127.0.0.1", port))
    if trusting is not None:
        made = trusting.wrap_socket(made)
    made.sendall(_REQUEST)
    made.recv(1)  # its answer has begun, and nothing more of it is read
    return made


def measure(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Growth of the server's resident memory, and how many clients it cut off."""
    trusting = None
    if options.tls:
        issued = trustme.CA().issue_cert("127.0.0.1")
        issued.cert_chain_pems[0].write_to_path(folder / _CHAIN)
        issued.private_key_pem.write_to_path(folder / _KEY)
        trusting = ssl.create_default_context()
        trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    command = [sys.executable, "-m", __spec__.name, *sys.argv[1:], "--serve-in", str(folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, text=True) as server, ExitStack() as clients:
        assert server.stdout is not None
        process, port = psutil.Process(server.pid), int(server.stdout.readline())
        before = process.memory_info().rss
        for _ in range(options.clients):
            clients.enter_context(_asking(port, trusting))
        time.sleep(_SETTLES_S)
        grown = process.memory_info().rss - before
        server.kill()
    cut = folder / "cut"
    return {
        "clients": options.clients,
        "answer_bytes": options.answer_bytes,
        "max_untaken_bytes": options.max_untaken_bytes,
        "tls": options.tls,
        "grown_mib": round(grown / 2**20),
        "cut_off": int(cut.read_text()) if cut.exists() else 0,
        **environment(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--answer-bytes", type=int, default=2**23)
    parser.add_argument("--max-untaken-bytes", type=int, default=DEFAULT_BYTES)
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--serve-in", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_in is not None:
        logging.disable(logging.WARNING)  # one for each that is cut off
        uvloop.run(_serve(options, options.serve_in))
        return
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.write(json.dumps(measure(options, Path(folder))) + "\n")


if __name__ == "__main__":
    main()
