"""The bench `push`: from `trimtab policy set` to a policy that holds in many nodes."""
