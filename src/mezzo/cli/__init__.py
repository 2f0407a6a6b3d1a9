"""The command line."""

from mezzo.cli.main import main

__all__ = ["main"]
