"""Solves shared by several servers and workers: one a question, wherever it was asked."""
