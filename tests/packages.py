"""The packages that are installed, for tests that read all of their source."""

PACKAGES = (
    "diptych",
    "router",
    "prefill_worker",
    "decode_worker",
    "soft_worker",
    "batch_server",
    "kvtransfer",
)
