"""What an agent's process knows of its worker's environment."""

from kvtransfer.transports.agent_process import environment


def test_no_secret_reaches_an_agents_process() -> None:
    ours = {
        "HF_TOKEN": "secret",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "DIPTYCH_API_KEY": "secret",
        "PATH": "/bin",
        "PYTHONPATH": "/src",
        "UCX_LOG_LEVEL": "info",
        "LD_LIBRARY_PATH": "/lib",
        "OMP_NUM_THREADS": "8",
    }
    theirs = environment(ours)
    assert "secret" not in theirs.values()
    assert theirs == {
        "PATH": "/bin",
        "PYTHONPATH": "/src",
        "UCX_LOG_LEVEL": "info",
        "LD_LIBRARY_PATH": "/lib",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
