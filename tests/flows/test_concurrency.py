"""Branches of a flow: whatever order they run in, each gets its own results, live and replayed."""
