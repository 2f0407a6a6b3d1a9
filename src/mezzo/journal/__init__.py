"""The record of a run: a header and one checksummed line a step."""
