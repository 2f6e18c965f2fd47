"""Waiting durably: timers and signals; parking, which nothing in a flow can see; values that replay sees again."""
