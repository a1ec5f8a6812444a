"""What goes wrong with a setting."""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting can't be used. The message names the flag, the value and the limit; it is shown to the
    user as it stands, and the process exits with code 2."""
