"""Errors that a user can act on."""


class UserError(Exception):
    """Bad input. The message is one line that names the key or file, its value and the fix.

    Entry points print the message alone, without a traceback, and exit with status 2.
    """
