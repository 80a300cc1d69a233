PY := .venv/bin/python

.PHONY: proto
proto: .venv/ready  ## Regenerate diptych/v1 from proto/
	$(PY) -m grpc_tools.protoc -I proto --python_out=. --pyi_out=. --grpc_python_out=. \
	  --plugin=protoc-gen-mypy_grpc=.venv/bin/protoc-gen-mypy_grpc --mypy_grpc_out=. proto/diptych/v1/*.proto
