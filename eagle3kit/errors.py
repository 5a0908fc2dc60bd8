"""The one error a user is meant to see."""


class KitError(Exception):
    """A mistake or a missing thing that the user can mend.

    The message is whole: it names the thing, the value, the place and the way out. The command line prints it as it is,
    without a traceback; a notebook shows it as its last line.
    """

    def _render_traceback_(self) -> list[str]:
        """What IPython shows instead of a traceback of ours."""
        return [f"{type(self).__name__}: {self}"]
