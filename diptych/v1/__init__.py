"""Generated from proto/diptych/v1 by `make proto`; do not edit."""
