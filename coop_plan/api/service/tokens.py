"""API tokens: a file with the hash, the scopes and the limits of each.

A token is 256 random bits: a plain SHA-256 protects it, since a dictionary attack is impossible.
"""

import hashlib
import hmac
import logging
import secrets
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from coop_plan.api.cli.output import write_whole
from coop_plan.schemas import InvalidInputError
from coop_plan.schemas._parse import Model, read

PREFIX = "coop_"

log = logging.getLogger("coop_plan.tokens")

Scope = Literal["plan", "read", "admin"]


class TokenLimits(Model, frozen=True, kw_only=True):
    """Limits of a token in each server; None for the server's own.

    Attributes:
        running_jobs: unfinished jobs of the token.
        seconds: of a request's time limit.
        ops: of a graph.
        bytes: of a decompressed body.
    """

    running_jobs: Annotated[int, Meta(ge=1)] | None = None
    requests_per_second: Annotated[int, Meta(ge=1)] | None = None
    seconds: Annotated[float, Meta(gt=0)] | None = None
    ops: Annotated[int, Meta(ge=1)] | None = None
    bytes: Annotated[int, Meta(ge=1)] | None = None


class Token(Model, frozen=True, kw_only=True):
    """One token by its SHA-256 in hexadecimal digits, with its scopes and limits.

    Scope `plan` sends graphs, requests plans and cancels jobs; `read` reads; `admin` reads metrics
    and cancels jobs. No scope includes another.
    """

    name: Annotated[str, Meta(min_length=1, max_length=100)]
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    scopes: Annotated[list[Scope], Meta(min_length=1)]
    limits: TokenLimits = TokenLimits()


class Tokens(Model, frozen=True, kw_only=True):
    """The document of a token file."""

    tokens: list[Token]

    def __post_init__(self) -> None:
        """Refuse two tokens of one name, which could not be revoked by name."""
        names: set[str] = set()
        for number, token in enumerate(self.tokens):
            if token.name in names:
                message = f"two tokens are named '{token.name}'"
                raise InvalidInputError(message, f"/tokens/{number}/name")
            names.add(token.name)

    def find(self, given: str) -> Token | None:
        """The token that `given` is, if any; in constant time."""
        digest = hash_of(given)
        found = None
        for token in self.tokens:
            if hmac.compare_digest(digest, token.sha256):
                found = token
        return found


def hash_of(token: str) -> str:
    """SHA-256 of a token, as the file has it."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def load(path: Path | str) -> Tokens:
    """The tokens of a file.

    Raises:
        InvalidInputError: the file cannot be read, is no token file, or has no token.
    """
    tokens = read(Tokens, path)
    if not tokens.tokens:
        raise InvalidInputError(
            "the file has no token: `coop-plan token` adds one", "/tokens", str(path)
        )
    return tokens


class TokenFile:
    """The tokens of a file, read again when it changes.

    A file that cannot be read then changes nothing, and is logged.

    Raises:
        InvalidInputError: as `load` does.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._version = self._stat()
        self._tokens = load(path)

    def find(self, given: str) -> Token | None:
        """The token that `given` is, if any."""
        version = self._stat()
        if version != self._version:
            self._version = version
            try:
                self._tokens = load(self._path)
            except InvalidInputError as error:
                log.warning("tokens are those of before: %s", error)
        return self._tokens.find(given)

    def _stat(self) -> tuple[int, ...]:
        try:
            found = self._path.stat()
        except OSError:
            return ()
        return found.st_ino, found.st_mtime_ns, found.st_size


def add(path: Path, name: str, scopes: list[Scope]) -> str:
    """Add a new token to a file, which is created if needed, readable by its owner only.

    Returns the token itself, which is stored nowhere.

    Raises:
        InvalidInputError: the file is no token file, or has a token of this name.
        OutputError: the file cannot be written.
    """
    existing = read(Tokens, path).tokens if path.exists() else []
    secret = PREFIX + secrets.token_urlsafe(32)
    token = Token(name=name, sha256=hash_of(secret), scopes=scopes)
    document = Tokens(tokens=[*existing, token])
    if not path.exists():
        path.touch(mode=0o600)
    write_whole(str(path), msgspec.json.format(document.to_json().encode(), indent=2) + b"\n")
    return secret
