"""In place of torchaudio, whose published extension does not load beside a CPU build of torch. The server imports it
for speech, of which a picture has none."""

from . import functional as functional
