"""`InvalidInputError`, the one error for invalid user input, and the text of a missing package."""


class InvalidInputError(ValueError):
    """Input that violates the contract: the fault and its place.

    Attributes:
        message: one sentence about the fault, without its place.
        pointer: JSON pointer (RFC 6901) of the fault in its document; "" for the whole document.
        source: file name or other origin of the document; "" if unknown.
    """

    def __init__(self, message: str, pointer: str = "", source: str = "") -> None:
        self.message = message
        self.pointer = pointer
        self.source = source
        place = f"{source}{'#' if source and pointer else ''}{pointer}"
        super().__init__(f"{place}: {message}" if place else message)


def missing_package(user: str, package: str | None, extra: str) -> str:
    """The message that `user` needs a package, with the command that installs its extra."""
    return f"{user} needs {package}: pip install '.[{extra}]' in a clone of coop-plan"
