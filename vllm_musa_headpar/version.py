"""The version, in a file of its own: whoever needs it imports nothing else with it."""

__version__ = "0.2.0"
