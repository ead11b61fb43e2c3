"""Device layer of a step: the arena in front of PyTorch's allocators, copy engines, and CUDA."""
