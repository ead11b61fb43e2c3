"""Integrations with training frameworks: a module each, the only one that imports it."""
