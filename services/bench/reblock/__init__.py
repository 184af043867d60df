"""`trimtab bench reblock`: what a change of the KV block size does to the streams of an engine that goes on serving."""
