"""Spawn two workers on real vLLM-Omni and compare every exchange with exact values; `--help` for the options."""

import torchada  # noqa: F401, I001 - before torch is imported, here and in every spawned worker

import argparse
import sys

from vllm_musa_headpar.cli import selftest

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    selftest.add_arguments(parser)
    sys.exit(selftest.run(parser.parse_args()))
