"""Public: what engine builders and users test with."""
