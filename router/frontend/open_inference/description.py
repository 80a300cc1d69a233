"""What clients are told of the server and of its model. Pure."""

from typing import Final

from diptych import __version__
from diptych.open_inference import service_pb2
from router.frontend.open_inference.asked import VERSION
from router.frontend.open_inference.tensors import BOOL, BYTES, FP32, INPUTS, OUTPUTS, UINT32

_NAME: Final = "diptych"
_EXTENSIONS: Final = ("model_configuration",)
_TYPES: Final = {
    BYTES: service_pb2.TYPE_STRING,
    BOOL: service_pb2.TYPE_BOOL,
    UINT32: service_pb2.TYPE_UINT32,
    FP32: service_pb2.TYPE_FP32,
}


def server_metadata() -> service_pb2.ServerMetadataResponse:
    """What serves."""
    return service_pb2.ServerMetadataResponse(
        name=_NAME, version=__version__, extensions=_EXTENSIONS
    )


def model_metadata(model: str) -> service_pb2.ModelMetadataResponse:
    """The tensors."""
    response = service_pb2.ModelMetadataResponse(name=model, versions=[VERSION], platform=_NAME)
    for described, specs in ((response.inputs, INPUTS), (response.outputs, OUTPUTS)):
        for spec in specs.values():
            described.add(name=spec.name, datatype=spec.datatype, shape=[spec.size])
    return response


def model_config(model: str) -> service_pb2.ModelConfigResponse:
    """The tensors, and that one request may have several responses."""
    config = service_pb2.ModelConfig(name=model, platform=_NAME, backend=_NAME)
    for spec in INPUTS.values():
        config.input.add(
            name=spec.name,
            data_type=_TYPES[spec.datatype],
            dims=[spec.size],
            optional=spec.is_optional,
        )
    for spec in OUTPUTS.values():
        config.output.add(name=spec.name, data_type=_TYPES[spec.datatype], dims=[spec.size])
    config.model_transaction_policy.decoupled = True
    return service_pb2.ModelConfigResponse(config=config)
