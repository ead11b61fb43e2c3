"""Settings of a server or a worker: flags, then the environment, then a file, then defaults."""

import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt, ValidationError
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from coop_plan.api.jobs.request_handler import Limits
from coop_plan.api.service.plan_service import ServiceSettings
from coop_plan.schemas import InvalidInputError, parse_bytes

PREFIX = "COOP_PLAN_"
"""Of the environment's variables: COOP_PLAN_MAX_BODY is --max-body."""

Size = Annotated[int, BeforeValidator(lambda given: parse_bytes(str(given)))]
"""Bytes, as a number or with a unit."""

Names = Annotated[
    tuple[str, ...],
    NoDecode,
    BeforeValidator(lambda given: given.split(",") if isinstance(given, str) else given),
]
"""Names, in a variable with commas between them."""


class Settings(BaseSettings):
    """The options of `coop-plan serve` and `coop-plan worker`; printed without addresses."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", hide_input_in_errors=True)

    config: Path | None = None
    store: str | None = Field(None, repr=False)
    store_size: Size = 1 << 30
    store_key: str | None = None
    max_body: Size = 64 << 20
    max_ops: PositiveInt = 100_000
    max_time_limit: float = Field(600.0, ge=1, le=1e6, allow_inf_nan=False)
    solvers: PositiveInt = os.cpu_count() or 1
    solver_memory: Size = 8 << 30
    broker: str | None = Field(None, repr=False)
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    allow_host: Names = ()
    tokens: str | None = None
    queue: NonNegativeInt = 64
    improve: bool = True

    @classmethod
    def settings_customise_sources(  # type: ignore[override]  # always called by keywords
        cls, settings_cls: type[BaseSettings], **sources: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, the environment, and the TOML file `config` of the flags."""
        flags = sources["init_settings"]
        file = TomlConfigSettingsSource(settings_cls, flags.init_kwargs.get("config"))
        return flags, sources["env_settings"], file

    def service(self, store: str, secret: bytes, **more: Any) -> ServiceSettings:
        """Settings of a service at the address of its store, or of a cluster's worker."""
        limits = Limits(self.max_body, self.max_ops, self.max_time_limit)
        shared = {"solvers", "solver_memory", "queue", "improve"}
        return ServiceSettings(
            store=store,
            secret=secret,
            broker=self.broker or "",
            limits=limits,
            **{"store_bytes": self.store_size, **self.model_dump(include=shared), **more},
        )


def settings_of(flags: dict[str, Any]) -> Settings:
    """The settings; flags that were not given are None or empty.

    Raises:
        InvalidInputError: a wrong value, with its option and its variable, or a wrong file.
    """
    file = flags.get("config") or os.environ.get(f"{PREFIX}CONFIG")
    given = {k: v for k, v in {**flags, "config": file}.items() if v not in (None, ())}
    if file is not None and not Path(file).is_file():
        raise InvalidInputError(f"--config: {file} is no file")
    try:
        return Settings(**given)
    except ValidationError as error:
        fault = error.errors()[0]
        name = str(fault["loc"][0])
        option = f"--{name.replace('_', '-')} ({PREFIX}{name.upper()})"
        raise InvalidInputError(f"{option}: {fault['msg'].removeprefix('Value error, ')}") from None
    except ValueError as error:
        raise InvalidInputError(f"--config: {file} is no TOML file: {error}") from None
