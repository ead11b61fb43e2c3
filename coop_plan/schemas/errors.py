"""`InvalidInputError`, the one error for invalid user input."""


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
