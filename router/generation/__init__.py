"""What every front end says to the router and hears from it: plain data, no protobuf, no gRPC."""
