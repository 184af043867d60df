"""Bench `peers`: our HTTP door beside another gateway before the same worker."""
