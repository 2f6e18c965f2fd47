"""Describing work: what users write, and how it is named, typed and fingerprinted."""
