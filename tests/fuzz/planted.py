"""The decoder with a bug put in, one that a single value of a single field meets. To see that the engine finds it. (With "rare", which no
mutation knows, three of four runs found it, after 1, 4 and 30 s; the fourth had not after 60 s.)"""

from tests.fuzz import decoder
from tests.fuzz.decoder import mutate as mutate
from tests.fuzz.decoder import seeds as seeds
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
