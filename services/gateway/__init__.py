"""A gateway: clients in front, workers behind."""
