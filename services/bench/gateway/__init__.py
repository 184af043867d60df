"""`trimtab bench gateway`: what a token costs a gateway, through one multiplexed stream per worker and through one stream per request."""
