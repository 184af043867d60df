"""The data plane: workers, gateways, the load generator."""
