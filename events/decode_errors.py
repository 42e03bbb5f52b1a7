"""What msgspec raises for bytes that it cannot decode."""

from __future__ import annotations

import msgspec

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""For an `except` beside a decoder. msgspec raises its own error for bytes of another form (also
`ValidationError`), UnicodeDecodeError for text that is no UTF-8, RecursionError for arrays within arrays."""
