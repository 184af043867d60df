"""A file of requests run as BATCH: OpenAI's batch lines in, its answer lines out."""
