"""`python -m bench.scaling`: one replica against N of them on one host, see `__main__.py`."""
