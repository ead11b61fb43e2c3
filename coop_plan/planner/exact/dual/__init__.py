"""Lower bounds, looked for beside the search."""
