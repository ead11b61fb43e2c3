"""Importers of PyTorch's recordings of a step: execution traces, Kineto traces, snapshots."""
