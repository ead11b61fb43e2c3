"""Plans that are kept, and carried over to another graph of the same structure."""
