"""gRPC between the processes of a cluster: channels, servers, statuses, long streams. Each once."""
