"""Stand-in for a vLLM-Omni newer than 0.30.0, written from the description of its API."""
