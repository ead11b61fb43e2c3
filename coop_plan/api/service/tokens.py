"""API tokens: a file of their hashes, what each may do, and how much of it.

A token is 256 random bits, so that its SHA-256 tells nothing of it: there is no dictionary to try.
"""

import hashlib
import hmac
import secrets
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from coop_plan.api.cli.output import write_whole
from coop_plan.schemas import InvalidInputError
from coop_plan.schemas._parse import Model, read

PREFIX = "coop_"

Scope = Literal["plan", "read", "admin"]


class TokenLimits(Model, frozen=True, kw_only=True):
    """
    What the holder of a token may take at most, in each server; what is not said is the server's.

    `running_jobs` counts the plans that are being made for it; `seconds` is of a time limit;
    `bytes` of a body, unpacked.
    """

    running_jobs: Annotated[int, Meta(ge=1)] | None = None
    requests_per_second: Annotated[int, Meta(ge=1)] | None = None
    seconds: Annotated[float, Meta(gt=0)] | None = None
    ops: Annotated[int, Meta(ge=1)] | None = None
    bytes: Annotated[int, Meta(ge=1)] | None = None


class Token(Model, frozen=True, kw_only=True):
    """
    One token: the SHA-256 of it in hexadecimal digits, and what it is for.

    `plan` sends graphs, asks for plans and cancels; `read` gets what there is; `admin` gets the
    metrics and cancels. None includes another.
    """

    name: Annotated[str, Meta(min_length=1, max_length=100)]
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    scopes: Annotated[list[Scope], Meta(min_length=1)]
    limits: TokenLimits = TokenLimits()


class Tokens(Model, frozen=True, kw_only=True):
    """A file of tokens."""

    tokens: list[Token]

    def __post_init__(self) -> None:
        """Refuse two of one name: which one was meant to be taken back?"""
        names: set[str] = set()
        for number, token in enumerate(self.tokens):
            if token.name in names:
                message = f"two tokens are named '{token.name}'"
                raise InvalidInputError(message, f"/tokens/{number}/name")
            names.add(token.name)

    def holder(self, given: str) -> Token | None:
        """The token of these characters; all are compared, in a time that tells nothing."""
        mine = hash_of(given)
        found = None
        for token in self.tokens:
            if hmac.compare_digest(mine, token.sha256):
                found = token
        return found


def hash_of(token: str) -> str:
    """What is kept of a token."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def load(path: Path | str) -> Tokens:
    """
    The tokens of a file.

    Raises:
        InvalidInputError: it cannot be read, or is no such file; a file without tokens lets nobody
            in, which is not what anybody means.
    """
    made = read(Tokens, path)
    if not made.tokens:
        raise InvalidInputError("there is no token in it", "/tokens", str(path))
    return made


def add(path: Path, name: str, scopes: list[Scope]) -> str:
    """
    A new token in a file, which is made for its owner only where there is none.

    Raises:
        InvalidInputError: the file is none of tokens, or has the name.
        OutputError: it cannot be written.
    """
    known = read(Tokens, path).tokens if path.exists() else []
    made = PREFIX + secrets.token_urlsafe(32)
    token = Token(name=name, sha256=hash_of(made), scopes=scopes)
    document = Tokens(tokens=[*known, token])
    fresh = not path.exists()
    if fresh:
        path.touch(mode=0o600)
    write_whole(str(path), msgspec.json.format(document.to_json().encode(), indent=2) + b"\n")
    return made
