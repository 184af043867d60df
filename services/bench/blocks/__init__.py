"""`trimtab bench blocks`: what each KV block size that an engine takes is worth in speed, in memory and in prefixes found again."""
