"""Four processes of a small run, killed and started again as a plan or chance has it; then the accounts are looked at."""

import multiprocessing
import random
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import msgspec

from configs.schema import Config
from replay.audit import audit
from replay.reader import RunReader
from replay.summary import TRAINED_TWICE
from replay.verify import verify
from tests.support.crash_main import start
from tests.support.frontier import skipped
from wire.errors import ConfigError

ACTORS = ("a0", "a1")
ROLES = ("replay", "learner", *ACTORS)
Plan = dict[str, list[tuple[str, int]]]
STUCK_S = 60.0


class Chaos:
    """`plan`: per role, the points (and at which passage) that its next lives die at, one each. `kills`: deaths by SIGKILL so far.
    `stays_dead`: for how many seconds whoever died is gone; it may outlast an order's lease."""

    def __init__(self, config: Config, folder: Path, plan: Plan | None = None, roles: tuple[str, ...] = ROLES) -> None:
        self.roles = roles
        self.config, self.run_dir = config, folder / "runs" / "test"
        self.plan = {role: list((plan or {}).get(role, [])) for role in roles}
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["tests.support.crash_main"])
        self.body = msgspec.json.encode(config.model_dump(mode="json"))
        self.children: dict[str, BaseProcess] = {}
        self.kills, self.odd = 0, []
        self.stays_dead: Callable[[str], float] = lambda role: 0.0
        self.back_at: dict[str, float] = {}
        (folder / "runs").mkdir()

    def start(self, role: str) -> None:
        point, count = self.plan[role].pop(0) if self.plan[role] else (None, 0)
        self.children[role] = self.context.Process(target=start, args=(role, self.body, self.run_dir, point, count), daemon=True)
        self.children[role].start()

    def look(self) -> None:
        """Start again whoever is gone."""
        now = time.monotonic()
        for role, child in list(self.children.items()):
            if child.exitcode is not None and now >= self.back_at.setdefault(role, now + self.stays_dead(role)):
                del self.back_at[role]
                self.kills += child.exitcode == -9
                if child.exitcode != -9:
                    self.odd.append((role, child.exitcode))
                child.close()
                self.start(role)

    def open(self) -> None:
        for role in self.roles:
            self.start(role)
            while role == "replay" and not (self.run_dir / "replay.sqlite").exists():
                time.sleep(0.02)
                self.look()

    def until_planned_deaths(self) -> None:
        """Every point of the plan was died at."""
        wanted, since = sum(map(len, self.plan.values())), time.monotonic()
        seen = 0
        self.open()
        while self.kills < wanted:
            time.sleep(0.01)
            self.look()
            assert not self.odd, self.odd
            if self.kills > seen:
                seen, since = self.kills, time.monotonic()
            assert time.monotonic() - since < STUCK_S, f"{self.kills} of {wanted} deaths; still to come: {self.plan}"

    def random_deaths(self, count: int, seed: int, longest_s: float = 0.2) -> None:
        source = random.Random(seed)
        self.open()
        while self.kills < count:
            time.sleep(source.uniform(0, longest_s))
            self.children[source.choice([role for role in self.roles if role not in self.back_at])].kill()
            time.sleep(0.005)
            self.look()
            assert not self.odd, self.odd

    def settle(self, updates: int) -> None:
        """Undisturbed, it goes on: so many further updates are committed."""
        began, at = time.monotonic(), self.updates()
        while self.updates() < at + updates:
            time.sleep(0.05)
            self.look()
            assert not self.odd, self.odd
            assert time.monotonic() - began < STUCK_S, f"stuck after {self.updates() - at} updates"

    def updates(self) -> int:
        try:
            with RunReader(self.run_dir) as run:
                return run.one("SELECT count(*) FROM updates WHERE state = 'committed'")
        except ConfigError:  # replay is only just making its tables
            return 0

    def end(self) -> None:
        for child in self.children.values():
            child.kill()
        for child in self.children.values():
            child.join(10)
            child.close()
        self.children.clear()

    def accounts(self) -> dict[str, int]:
        """After the end. Asserts all that must hold; returns what there was."""
        acknowledged = [line.split() for path in self.run_dir.parent.glob("*.journal") for line in path.read_text().splitlines()]
        with RunReader(self.run_dir) as run:
            stored = dict(run.sql("SELECT rollout_id, payload_digest FROM rollouts"))
            evaluated = {r for r, in run.sql("SELECT rollout_id FROM eval_rollouts")}
            lost = [r for r, told in acknowledged if stored.get(r, told if r in evaluated else None) != told]
            assert lost == [], f"{len(lost)} of {len(acknowledged)} acknowledged rollouts are lost: {lost[:5]}"
            trained_twice = run.one(TRAINED_TWICE)
            assert trained_twice == 0
            assert skipped(run.sql, self.config) == []
            twice = run.sql("SELECT order_id FROM groups WHERE purpose = 'train' AND state = 'trained' GROUP BY 1 HAVING count(*) > 1")
            assert twice == [], "a prompt was trained twice"
            duplicates = run.counters().get("duplicates_refused", 0)
        findings = [*audit(self.run_dir).findings, *verify(self.run_dir).findings]
        assert findings == []
        return {"kills": self.kills, "acknowledged": len(acknowledged), "lost": len(lost), "trained_twice": trained_twice,
                "stored": len(stored), "updates": self.updates(), "duplicates_refused": int(duplicates), "findings": len(findings)}
