"""`python -m bench.kernels`: the worker's GPU kernels one by one, see `__main__.py`."""
