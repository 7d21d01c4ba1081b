"""One digest for everything: BLAKE3, 256 bits, as 64 hexadecimal characters."""

import json
from pathlib import Path
from typing import Any

from blake3 import blake3


def digest(*parts: bytes | memoryview) -> str:
    """Digest of the concatenation of `parts`."""
    hasher = blake3(parts[0]) if parts else blake3()
    for part in parts[1:]:
        hasher.update(part)
    return hasher.hexdigest()


def digest_json(value: Any) -> str:
    """Digest of a JSON value in canonical form (sorted keys, no spaces, no NaN)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return digest(text.encode())


def digest_file(path: Path) -> str:
    hasher = blake3()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            hasher.update(chunk)
    return hasher.hexdigest()
