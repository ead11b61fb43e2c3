"""Records: named fields for the arrays of kernels, as `s.access[x].end`.

A subclass of `Record` declares the fields. `Table[Access]` is the type of an array of records,
and `Access` that of a single one, for scalars that kernels change.
"""

from typing import Annotated, Any, ClassVar, Protocol, TypeVar, cast, get_args, overload

import numpy as np
import numpy.typing as npt

Int32 = Annotated[int, np.int32]
"""Field of four bytes; those of type `int` and `float` have eight, `bool` has one."""


class Record:
    """Base of records: the annotations of a class are its fields, in the order of their storage.

    Raises TypeError for a field with the name of a method of NumPy's records.
    """

    dtype: ClassVar[np.dtype[Any]]

    def __init_subclass__(cls) -> None:
        fields = [
            (name, get_args(kind)[1] if get_args(kind) else kind)
            for name, kind in cls.__annotations__.items()
        ]
        for name, _ in fields:
            if hasattr(np.record, name):
                raise TypeError(f"{cls.__name__}.{name} is a method of NumPy's records: rename it")
        cls.dtype = np.dtype((np.record, np.dtype(fields, align=True)))


R = TypeVar("R", bound=Record)
R_co = TypeVar("R_co", bound=Record, covariant=True)


class Table(Protocol[R_co]):
    """Array of records: record i as `table[i]`, and all values of a field as `table["field"]`."""

    @property
    def size(self) -> int:
        """Number of records."""

    @overload
    def __getitem__(self, at: int, /) -> R_co: ...
    @overload
    def __getitem__(self, at: str | slice, /) -> npt.NDArray[Any]: ...
    def __setitem__(self, at: int | str | slice, value: Any, /) -> None: ...


def table(kind: type[R], count: int) -> Table[R]:
    """Table of `count` records, all fields 0."""
    return cast("Table[R]", np.zeros(count, dtype=kind.dtype))


def record(kind: type[R]) -> R:
    """One record, all fields 0."""
    return cast("R", np.zeros((), dtype=kind.dtype)[()])
