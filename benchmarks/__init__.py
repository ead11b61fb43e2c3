"""Measurements that make the figures in the README; none of them is a timed test."""
