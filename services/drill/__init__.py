"""Drills: faults on a mesh that they start themselves, and a report of what its clients saw of them."""
