"""Benches: load on a mesh that they start themselves, and a report that sets each figure beside its goal."""
