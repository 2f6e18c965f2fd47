"""`python -m benchmarks`: Relight beside its peers and beside SQLite alone. See docs/benchmarks.md for the method."""
