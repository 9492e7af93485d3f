"""pytest with torchada imported before torch: `python entrypoints/pytest_musa.py -m musa tests`."""

import torchada  # noqa: F401, I001 - before torch is imported

import sys

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main(sys.argv[1:]))
