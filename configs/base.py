"""What the tables of the config tree share."""

from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
AboveZero = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]


class Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=(),
                              allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Else true would pass as 1: `clip_low = true` would be no clip at all."""
        kind = cls.model_fields[info.field_name].annotation if info.field_name else None
        if isinstance(value, bool) and bool not in (kind, *get_args(kind)):
            raise ValueError("true and false are no values of this key")
        return value
