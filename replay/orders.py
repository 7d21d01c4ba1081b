"""Work orders in the store: text and digest, so that a prompt or an answer that rotted is asked of nobody."""

from typing import Any

import msgspec

from wire.digest import digest
from wire.errors import StoreError
from wire.record import WorkOrder

_json = msgspec.json.Encoder().encode
_order = msgspec.json.Decoder(WorkOrder)


def order_columns(order: WorkOrder) -> tuple[str, str]:
    """`work_order` and `work_order_digest` of a group's row."""
    text = _json(order)
    return text.decode(), digest(text)


def stored_order(group: str, text: Any, told: Any) -> WorkOrder:
    """The order of a row. Raises StoreError when its text is not what was written."""
    if not isinstance(text, str) or digest(text.encode()) != told:
        raise damaged(f"the work order of group {group}")
    return _order.decode(text)


def damaged(what: str) -> StoreError:
    return StoreError(f"{what} in the store is not what was acknowledged: see what is damaged, with `leeway replay --verify RUN`, and "
                      "bring back a copy of the file")
