"""`python -m suptickets`."""

from suptickets.cli import program

program()
