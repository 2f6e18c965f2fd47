"""What the engine needs from the outside, with the contracts in the docstrings.

store: what a store must do, and the commit protocol; it knows nothing of flows, steps and recovery policy. leases:
which owners are alive, and which runs each of them owns; it knows nothing of rows and journals.
"""
