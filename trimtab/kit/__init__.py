"""What every process of the mesh needs around its logic: settings, telemetry, RPC, processes."""
