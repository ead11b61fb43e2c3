"""On-disk caches: op profiles and plans."""
