"""The CUDA backend on the host, for tests: its kernels are interpreted on tensors of torch.

Triton decides when it is imported whether kernels are interpreted, so this must be the first
in its process that brings it in. A process that compiles kernels needs the variable unset.
"""

import os
import sys

import pytest
import torch

if "triton" in sys.modules and "TRITON_INTERPRET" not in os.environ:
    raise ImportError("triton was imported before tests.triton_interpreter: nothing is interpreted")
os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="triton is not installed: its kernels cannot be tried")

from diptych.engine.backends.cuda.backend import CudaBackend

INTERPRETED = CudaBackend(torch.device("cpu"))
