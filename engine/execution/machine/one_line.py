"""Messages of other libraries, fitted into one line of ours."""

MAX_CHARS = 300


def one_line(error: BaseException) -> str:
    """What `error` says, without line breaks, cut after `MAX_CHARS`; its type if it says nothing."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, KeyError):
        text = f"{text} is missing"
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}..."
