"""What outlives the process: op profiles and plans."""
