"""The one exception that is meant for the user's eyes."""


class UserError(Exception):
    """A mistake in what the user gave (a flag, a file, a model), or a state that needs the user.

    The message names what is wrong, where, and what to do. `train.py` prints it as one line and
    exits with status 2; it is never shown as a traceback.
    """
