"""One module per data set layout; no reader imports another."""
