"""docs/wire-format.md speaks of exactly the messages, fields, limits and numbers of the code."""

import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from replay.handlers import LONGEST_WAIT_S
from replay.sessions import ROLES_OF_KEY
from wire import codec, messages
from wire.codec import ITEM_SIZES, bulk_size
from wire.messages import AnyMessage, Reply, Request

PAGE = (Path(__file__).parents[2] / "docs" / "wire-format.md").read_text()
CLASSES = {kind.__name__: kind for kind in get_args(AnyMessage)}
ROWS = {cells[0].strip("`"): cells[1:] for line in PAGE.splitlines()
        if re.match(r"\| `[A-Z]\w+` \| (replay|client|actor|learner)", line)
        for cells in [[cell.strip() for cell in line.strip("|").split("|")]]}


def test_every_message_is_there_and_no_other() -> None:
    assert set(ROWS) == set(CLASSES)
    assert len(re.findall(r"^\| `[A-Z]\w+` \|", PAGE, re.MULTILINE)) == len(ROWS)


@pytest.mark.parametrize("name", CLASSES)
def test_its_fields_and_who_sends_it(name: str) -> None:
    sender, fields, _, answers = ROWS[name]
    assert re.findall(r"`(\w+)`", fields) == [field.name for field in msgspec.structs.fields(CLASSES[name])]
    assert (sender == "replay") == (CLASSES[name] in get_args(Reply))
    replies = re.findall(r"`(\w+)`", answers)
    assert bool(replies) == (CLASSES[name] in get_args(Request))
    assert {CLASSES[reply] for reply in replies} <= set(get_args(Reply))


def test_every_reply_answers_something() -> None:
    answered = {reply for *_, answers in ROWS.values() for reply in re.findall(r"`(\w+)`", answers)}
    assert answered | {"Refusal"} == {kind.__name__ for kind in get_args(Reply)}


def test_messages_with_a_bulk_frame_say_what_it_holds() -> None:
    source = Path(codec.__file__).read_text()
    with_bulk = set(re.findall(r"(?:case|\|) (\w+)\(", source[source.index("def bulk_size"):]))
    assert {name for name, (_, _, bulk, _) in ROWS.items() if bulk} == with_bulk
    assert bulk_size(messages.Ok()) == 0
    assert set(ITEM_SIZES) == {"f4", "u1"}


def test_limits_and_numbers() -> None:
    assert f"Version of the protocol: **{messages.PROTOCOL}**" in PAGE
    assert (codec.REQUEST, codec.REPLY) == ((16 << 20, 1_048_576), (64 << 20, 8_388_608))
    assert (codec.MAX_BULK, codec.MAX_DEPTH) == (1 << 30, 14)
    assert codec.MAX_INT == 2**63 - 1
    assert messages.MAX_CHUNK == 4 << 20
    for row in ("| header of a request | 16 MiB, 1,048,576 items |", "| header of a reply | 64 MiB, 8,388,608 items |", "| bulk | 1 GiB |",
                "| nesting of a part without a type | 14 |", "| `Fetch.count` | 4 MiB |"):
        assert row in PAGE
    assert LONGEST_WAIT_S == 30.0
    assert ROLES_OF_KEY == {"actor": ("actor", "tool"), "learner": ("learner", "rank", "tool")}
