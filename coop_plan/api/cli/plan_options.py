"""Click options of the commands that plan, from the fields of `PlanOptions`."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin

import click
from msgspec import NODEFAULT, Meta
from msgspec.structs import FieldInfo
from msgspec.structs import fields as struct_fields

from coop_plan.planner.options import PlanOptions
from coop_plan.schemas.errors import InvalidInputError

F = TypeVar("F", bound=Callable[..., Any])

SWITCHES = "switches"
"""The field that the command spells `--ablate SWITCH`, once for each switch, and `--relax`."""

RELAX = "integral"
"""The switch of checkmate that `--relax` turns off."""

_ABLATE = click.option(
    "--ablate",
    multiple=True,
    metavar="SWITCH",
    help="Turn one part of the method off, to measure what it is worth; may be repeated."
    " `coop-plan methods` lists the switches and the effect of each.  [default: all on]",
)
_RELAX = click.option(
    "--relax",
    is_flag=True,
    help="Let checkmate solve the linear relaxation and round it in two phases: faster, for larger"
    f" graphs, at more overhead. The same as --ablate {RELAX}.  [default: exact integer program]",
)


def plan_options(*names: str) -> Callable[[F], F]:
    """Decorator that adds the click options of fields of `PlanOptions`: of `names`, or all."""

    def decorate(command: F) -> F:
        for info in reversed(struct_fields(PlanOptions)):
            if names and info.encode_name not in names:
                continue
            added = (_ABLATE, _RELAX) if info.encode_name == SWITCHES else (_click_option(info),)
            for option in reversed(added):
                command = option(command)
        return command

    return decorate


def _click_option(info: FieldInfo) -> Callable[[F], F]:
    meta = next(part for part in get_args(info.type) if isinstance(part, Meta))
    shown = meta.extra or {}
    kind = info.type
    while get_origin(kind) is not Literal and get_args(kind):  # of a union, its first member
        kind = get_args(kind)[0]
    default = f"  [default: {shown['default']}]" if "default" in shown else ""
    return click.option(
        f"--{info.encode_name.replace('_', '-')}",
        type=click.Choice(get_args(kind)) if get_args(kind) else kind,  # `PlanOptions` has limits
        is_flag=kind is bool,
        required=info.default is NODEFAULT,
        default=None if info.default is NODEFAULT else info.default,
        show_default=True,
        metavar=shown.get("metavar"),
        help=f"{meta.description}{default}",
    )


def parse_plan_options(
    values: Mapping[str, Any], ablate: tuple[str, ...] = (), relax: bool = False
) -> PlanOptions:
    """Options from the values of `plan_options`.

    Raises:
        InvalidInputError: naming the field by a pointer (`/budget`).
    """
    from coop_plan.planner.registry import METHODS

    off = (*ablate, *([RELAX] if relax else []))
    method = METHODS.get(values.get("method", ""))
    if relax and method is not None and RELAX not in method.switches:
        able = ", ".join(info.name for info in METHODS.values() if RELAX in info.switches)
        raise click.UsageError(f"--relax is for {able}, not for {method.name}")
    return PlanOptions.of({**values, SWITCHES: dict.fromkeys(off, False)})


def option_message(error: InvalidInputError) -> str:
    """The error's message with the option it is about, such as `--seed: ...`, in front."""
    name = error.pointer.split("/")[1] if error.pointer else ""
    option = {"": "", SWITCHES: "--ablate: "}.get(name, f"--{name.replace('_', '-')}: ")
    return f"{option}{error.message}"
