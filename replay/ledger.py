"""The append-only ledger: every transition of the run is one row, and each row holds the hash of the row before.

Kinds, and what their bodies name:
  created, opened       config digest; keys changed on resume
  hello, engine, applied, note, finished      process, epoch; fingerprint; version and probe; what it wants a person to see
  version               a version's notice (the initial weights)
  grant, give_back      orders to an actor (groups), and back
  put                   rollouts with the digests of their payloads and heads, failures, quarantined
  baseline_put          greedy baselines of training groups, in the same way
  groups                settled, expired and requeued groups
  anchors               spans with their anchor digests: old log-probs, source, weights, trainer, plan
  lease, commit         groups of an update; digests of its record, columns and metrics, its version
  checkpoint, fork      a complete checkpoint; updates and versions given up
  eval_planned, eval_put, eval_done           an evaluation, its answers, its result
  retention             payloads and files removed
A body that moves groups holds `to`: {"complete": [group ids], "dropped(reason)": [...], ...} and `requeued`: [new group ids].
"""

from typing import Any

import msgspec

from wire.digest import digest

FIRST = "0" * 64


def row_hash(prev: str, seq: int, kind: str, body: str) -> str:
    """Hash of a row: BLAKE3 of `prev|seq|kind|body`. `prev` of the first row is 64 zeros; `seq` counts from 1."""
    return digest(f"{prev}|{seq}|{kind}|{body}".encode())


class Ledger:
    """Holds the head; makes the next row. The store writes it in the transaction of what it speaks of."""

    def __init__(self, seq: int = 0, head: str = FIRST) -> None:
        self.seq, self.head = seq, head

    def next(self, kind: str, body: dict[str, Any]) -> tuple[int, str, str, str, str]:
        """(seq, kind, body, prev, hash) of the next row, which becomes the head."""
        text = msgspec.json.encode(body).decode()
        prev, self.seq = self.head, self.seq + 1
        self.head = row_hash(prev, self.seq, kind, text)
        return self.seq, kind, text, prev, self.head
