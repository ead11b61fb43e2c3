"""coop-offline: plans the whole step first, places second."""
