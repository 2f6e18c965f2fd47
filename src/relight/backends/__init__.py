"""Stores and lease managers: memory, sqlite, postgres (stores with their leases), etcd (leases), none (no leases).

Each imports only ports, model and what is below them. Siblings never import each other; `backend_choice` chooses one.
"""
