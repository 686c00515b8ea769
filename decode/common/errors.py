"""Errors that a person can act on, and the exit code each one ends a stage with."""


class UserError(Exception):
    """The request cannot be carried out as asked; the stage ends with exit code 2, before any costly work."""


class ConfigError(UserError):
    """A configuration value is unknown, of the wrong type or out of range, or contradicts another one."""


class InputError(UserError):
    """A file, record folder or model does not exist, is malformed, or does not fit the others."""


class RunError(Exception):
    """A run failed on its way (a NaN loss, a full disk); the stage ends with exit code 1."""
