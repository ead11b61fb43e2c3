"""Cache of plans and refusals, keyed by graph structure and options."""
