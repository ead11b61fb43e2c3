"""What PyTorch recorded of a real step, as a graph or as buffers."""
