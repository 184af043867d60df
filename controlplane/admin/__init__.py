"""The AdminService: what people and tools ask of the control plane, and the client that asks it."""
