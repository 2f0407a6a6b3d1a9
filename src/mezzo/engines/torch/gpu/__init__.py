"""The fast path on a GPU: kernels, captured graphs, steps that the device runs by itself."""
