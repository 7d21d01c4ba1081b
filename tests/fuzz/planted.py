"""The decoder with a bug put in, one that a single value of a single field meets. To see that the engine finds it. (With a value that no mutation
knows, "rare", four runs found it after 1, 4 and 30 s, and not within 60 s.)"""

from tests.fuzz import decoder
from tests.fuzz.decoder import mutate as mutate, seeds as seeds
from tests.fuzz.parts import unpack
from wire.codec import decode
from wire.errors import ProtocolError
from wire.messages import Note

KIND = "t1.1"


def check(data: bytes) -> None:
    decoder.check(data)
    try:
        _, message, _ = decode(unpack(data))
    except ProtocolError:
        return
    if isinstance(message, Note) and message.kind == KIND:
        raise KeyError(KIND)
