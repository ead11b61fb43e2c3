"""Doors for training frameworks: each file imports its framework, and no other file imports it."""
