"""Generated from proto/diptych/open_inference by `make proto`; do not edit."""
