"""What exists only for speed: CUDA graphs and Triton kernels."""
