"""The one error that a user's input can cause."""


class InvalidInputError(ValueError):
    """
    Input that breaks the contract: what is wrong, and where.

    Attributes:
        message: one sentence, without the place.
        pointer: JSON pointer (RFC 6901) of the fault inside its document; "" for the whole.
        source: file name or other origin of the document, when known.
    """

    def __init__(self, message: str, pointer: str = "", source: str = "") -> None:
        self.message = message
        self.pointer = pointer
        self.source = source
        place = f"{source}{'#' if source and pointer else ''}{pointer}"
        super().__init__(f"{place}: {message}" if place else message)
