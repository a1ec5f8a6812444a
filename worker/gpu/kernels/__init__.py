"""Triton kernels. Only the GPU runner imports these modules: each needs triton at import."""
