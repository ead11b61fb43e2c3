"""The device of a step: the arena in front of PyTorch's allocators, and CUDA."""
