"""Job executor on a cluster: servers and workers share jobs in Redis, one for each request."""
