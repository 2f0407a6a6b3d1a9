"""A run from its configuration to its result: setup, training loop, folder, exports."""
