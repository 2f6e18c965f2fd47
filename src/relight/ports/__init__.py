"""What the engine needs from the outside, with the contracts in the docstrings."""
