"""The error for a setting that cannot be used."""


class SettingError(Exception):
    """One line: the flag, variable or key as it was written, the values that are allowed, and the value."""
