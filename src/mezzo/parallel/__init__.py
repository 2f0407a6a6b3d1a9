"""Engines made of workers: units of work go out, scores come back, and no weight is ever copied between workers."""
