"""Stores. Siblings never import each other; the engine picks one."""
