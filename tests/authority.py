"""Certificates for tests: an authority, and files as a process's settings name them."""

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import trustme

DOMAIN = "diptych"


class Authority:
    """Issues certificates into folders, each with the three files of ``--tls``."""

    def __init__(self, work: Path, key_type: trustme.KeyType = trustme.KeyType.ECDSA) -> None:
        self._work = work
        self._key_type = key_type
        self._ca = trustme.CA()

    def issue(self, role: str, *, folder: str = "", domain: str = DOMAIN, days: int = 1) -> Path:
        """A folder with a new certificate of that role; ``days`` is when it ends, from now."""
        return self.issue_name(f"{role}.{domain}", folder or role, days=days)

    def issue_name(self, name: str, folder: str, *, days: int = 1) -> Path:
        """As ``issue``, of a name or an address."""
        to = self._work / folder
        to.mkdir(parents=True, exist_ok=True)
        ends = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
        begins = ends - datetime.timedelta(days=365)
        issued = self._ca.issue_cert(
            name, not_before=begins, not_after=ends, key_type=self._key_type
        )
        (to / "key.pem").write_bytes(issued.private_key_pem.bytes())
        chain = b"".join(pem.bytes() for pem in issued.cert_chain_pems)
        (to / "certificate.pem").write_bytes(chain)
        self.trust(to)
        return to

    def trust(self, folder: Path) -> None:
        """Have this authority, and no other, be who is believed there."""
        (folder / "ca.pem").write_bytes(self._ca.cert_pem.bytes())


def flags(folder: Path) -> dict[str, str]:
    """The settings that name a folder's files."""
    return {f"tls.{name}": str(folder / f"{name}.pem") for name in ("certificate", "key", "ca")}


@contextmanager
def replaced(folder: Path, by: Path) -> Iterator[None]:
    """Other files in their place, until the block ends."""
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for path in by.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    try:
        yield
    finally:
        for name, content in before.items():
            (folder / name).write_bytes(content)
