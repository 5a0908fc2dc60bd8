"""What every section of parameters is: frozen, strict, and aware of which of its fields were read."""

from contextlib import suppress
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict


def _not_bool(value: Any) -> Any:
    # pydantic takes True for 1; in a YAML file that is a slip (`samples: yes`), never a count.
    if isinstance(value, bool):
        raise ValueError("should be a number, not true or false")
    return value


Int = Annotated[int, BeforeValidator(_not_bool)]
Float = Annotated[float, BeforeValidator(_not_bool)]


class Recorded(BaseModel):
    """A frozen model that notes which of its fields are read.

    Comparing and validating note nothing. Dumping or iterating a section hands out every value: it notes them all.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    # Slots, not private attributes: pydantic compares those, and two equal sets of values must stay equal.
    __slots__ = ("_prefix", "_seen")

    def __getattribute__(self, name: str) -> Any:
        get = object.__getattribute__
        if name in type(self).__pydantic_fields__:
            with suppress(AttributeError):  # no slots yet: still under validation, nobody has seen it
                get(self, "_seen").add(get(self, "_prefix") + name)
        return get(self, name)

    def _watch(self, seen: set[str], prefix: str) -> None:
        object.__setattr__(self, "_seen", seen)
        object.__setattr__(self, "_prefix", prefix)


class Section(Recorded):
    """One section of a parameter file."""

    def __iter__(self):
        return iter([(name, getattr(self, name)) for name in type(self).__pydantic_fields__])

    def model_dump(self, **options: Any) -> dict[str, Any]:
        for name in type(self).__pydantic_fields__:
            getattr(self, name)
        return super().model_dump(**options)
