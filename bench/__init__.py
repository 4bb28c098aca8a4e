"""Benchmarks: what headway costs, next to the nearest peer or to the physical floor. `python -m bench --help`."""
