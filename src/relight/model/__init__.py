"""Pure data and rules, no I/O."""
