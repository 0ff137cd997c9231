"""The error of everything that loads, trains or uses a tokenizer."""

from __future__ import annotations

from pipeline.base.errors import TokenmillError


class TokenizerError(TokenmillError, ValueError):
    """Raised if a tokenizer cannot be trained, loaded or used. The message names the file or the setting."""

    permanent = True
