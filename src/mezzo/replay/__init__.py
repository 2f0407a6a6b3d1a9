"""Weights from the base model and a journal, bit for bit."""
