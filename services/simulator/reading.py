"""Errors in users' files, in words."""


def reason(error: Exception) -> str:
    """An OSError's without its number; of a KeyError, whose text is a name alone, that the name is
    missing."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)
