"""The real scheduler before a device that exists as a formula; `python -m bench.simulate` is its command."""
