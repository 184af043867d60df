"""`trimtab drill hosts`: a mesh over several hosts with mTLS, and links between them that are cut without a word."""
