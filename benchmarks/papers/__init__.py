"""The figures of the papers that coop-plan follows, beside ours (`python -m benchmarks.papers`)."""
