"""What clients speak with over gRPC: the public Batches service."""
