"""Generated from protos/trimtab/v1 by tools/generate.py; never edited."""
