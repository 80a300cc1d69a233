"""Answers for SRV records, as a cluster's DNS does of headless services."""

import socket
import threading
from collections.abc import Mapping

import dns.message
import dns.rcode
import dns.rrset


class NameServer:
    """Names and the one host:port that each has. Any other name does not exist.

    A thread of its own answers from ``start`` to ``stop``.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve, name="name-server", daemon=True)

    @property
    def address(self) -> str:
        """ip:port."""
        return f"127.0.0.1:{self._socket.getsockname()[1]}"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
            last.sendto(b"", self._socket.getsockname())
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while True:
            question, client = self._socket.recvfrom(4096)
            if not question:
                return
            self._socket.sendto(self._answer(dns.message.from_wire(question)), client)

    def _answer(self, question: dns.message.Message) -> bytes:
        name = question.question[0].name
        answer = dns.message.make_response(question)
        address = self._names.get(name.to_text())
        if address is None:
            answer.set_rcode(dns.rcode.NXDOMAIN)
            return answer.to_wire()
        host, _, port = address.rpartition(":")
        target = {"127.0.0.1": "localhost"}[host]
        answer.answer.append(dns.rrset.from_text(name, 5, "IN", "SRV", f"0 0 {port} {target}."))
        return answer.to_wire()
