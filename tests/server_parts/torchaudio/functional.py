"""What is imported by name."""

from __future__ import annotations

from typing import NoReturn


def melscale_fbanks(*args: object, **kwargs: object) -> NoReturn:
    """Mel filters, for speech."""
    raise NotImplementedError("this stands in for torchaudio in a test of pictures")
