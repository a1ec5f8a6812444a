"""The runner for NVIDIA GPUs. Importing this package imports neither torch, triton nor flashinfer."""
