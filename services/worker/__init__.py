"""A worker: one engine behind gRPC."""
