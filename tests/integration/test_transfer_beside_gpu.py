"""nixl on host memory in a machine with a GPU whose driver is not there, as in a pod without it.

nixl finds GPUs on the PCI bus: one is put there, for one process to see.
"""

import subprocess
import sys
from pathlib import Path

import pytest

_BUS = "/sys/bus/pci/devices"
_GPU = {"vendor": "0x10de", "class": "0x030200", "device": "0x2335"}  # an H200
_AGENT = """
import sys
import numpy as np
from kvtransfer.agents.nixl import NixlAgent
from kvtransfer.config import TransferConfig
from kvtransfer.errors import TransportError
from kvtransfer.memory import HostMemory
from kvtransfer.transports.agent_identity import AgentIdentity
from kvtransfer.transports.lanes import nixl_lanes

config = TransferConfig(ucx_tls=sys.argv[1].split(",") if sys.argv[1] else None)
pool = np.zeros(1 << 16, np.uint8)
identity = AgentIdentity("nixl", nixl_lanes, config, "me", HostMemory(pool, 4096))
try:
    NixlAgent(identity.next_life(), identity.region(pool.ctypes.data)).close()
except TransportError as error:
    print(error)
else:
    print("started")
"""


@pytest.fixture
def beside_gpu(tmp_path: Path) -> list[str]:
    """The command that executes another one where a GPU is."""
    gpu = tmp_path / "bus" / "0000:00:1e.0"
    gpu.mkdir(parents=True)
    for name, value in _GPU.items():
        (gpu / name).write_text(f"{value}\n")
    mounted = f'mount --bind "{gpu.parent}" {_BUS} && exec "$0" "$@"'
    command = ["unshare", "--mount", "sh", "-c", mounted]
    try:
        subprocess.run([*command, "true"], check=True, capture_output=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no mounts of its own: {error}")
    return command


@pytest.mark.parametrize(
    ("ucx_tls", "said"),
    [
        ("", "started"),
        ("cma,tcp,cuda_copy", "started"),
        ("cma,tcp", "with an NVIDIA GPU in the machine it needs cuda_copy in ucx_tls"),
    ],
)
def test_an_agent_of_host_memory_beside_a_gpu(
    ucx_tls: str, said: str, beside_gpu: list[str]
) -> None:
    pytest.importorskip("nixl")
    command = [*beside_gpu, sys.executable, "-c", _AGENT, ucx_tls]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert said in done.stdout
    assert done.stderr == ""
