"""From a solution of a model to a placed schedule."""
