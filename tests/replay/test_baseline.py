"""The probe's baseline of a run: the first mean difference that an engine of a fingerprint proved, whoever asks and whenever."""

import math
from typing import Any

import msgspec
import pytest

from tests.replay.conftest import Stage
from tests.support.replay import ENGINE, PRINT, LightActor, notice
from wire.errors import ProtocolError, RefusedError
from wire.messages import Applied, Engine
from wire.record import fingerprint_id


def baseline(actor: LightActor, dtype: str = PRINT.dtype) -> Any:
    print_ = msgspec.structs.replace(PRINT, dtype=dtype)
    reply, _ = actor.client.call(Engine(actor.epoch, fingerprint_id(print_), print_))
    return reply.probe_mean  # type: ignore[union-attr]


def prove(actor: LightActor, version: int, mean: float) -> None:
    actor.client.call(Applied(actor.epoch, version, notice(version).weights_digest, mean, 2 * mean))


def test_the_first_proved_difference_is_kept_and_given_to_every_later_engine_of_the_kind(stage: Stage) -> None:
    learner = stage.learner()
    actor = stage.actor()
    assert baseline(actor) is None
    prove(actor, 0, 0.0123456789)
    stage.reopen()
    other = stage.actor("a1")
    assert baseline(other) == 0.0123456789
    prove(other, 0, 0.03)
    actor = stage.actor()
    assert baseline(actor) == 0.0123456789
    assert baseline(actor, "bfloat16") is None  # another kind of engine has its own
    prove(actor, 0, 0.25)
    assert (baseline(actor, "bfloat16"), baseline(actor)) == (0.25, 0.0123456789)
    assert learner.committed == 0


@pytest.mark.parametrize("mean", [math.nan, math.inf, -1.0])
def test_a_difference_that_is_none_is_no_proof(stage: Stage, mean: float) -> None:
    stage.learner()
    actor = stage.actor()
    with pytest.raises(ProtocolError, match="the probe differs by"):
        prove(actor, 0, mean)
    assert baseline(actor) is None


def test_the_id_of_an_engine_is_that_of_what_it_says_and_stays_so(stage: Stage) -> None:
    """Rollouts name their engine by it: nobody may say anything else of an id, least of all of another's."""
    actor, other = stage.actor(), stage.actor("a1")
    before = stage.rows("SELECT id, body FROM fingerprints")
    assert ENGINE == "272a7d960269a7f8"
    assert [name for name, _ in before] == [ENGINE]
    larger = msgspec.structs.replace(PRINT, vocabulary=60_000)
    for name in (ENGINE, "f1"):
        with pytest.raises(ProtocolError, match=f"engine {name}: what it says of itself has the id {fingerprint_id(larger)}"):
            other.client.call(Engine(other.epoch, name, larger))
    assert stage.rows("SELECT id, body FROM fingerprints") == before
    assert stage.core.vocabularies == {ENGINE: 50_000}
    other.client.call(Engine(other.epoch, fingerprint_id(larger), larger))
    actor.client.call(Engine(actor.epoch, ENGINE, PRINT))  # again: as after a restart
    assert stage.core.vocabularies == {ENGINE: 50_000, fingerprint_id(larger): 60_000}
    stage.core.store.db.execute("UPDATE fingerprints SET body = replace(body, 'fake', 'real') WHERE id = ?", (ENGINE,))
    with pytest.raises(RefusedError, match=f"engine {ENGINE}: this id is stored for another engine: .*real"):
        actor.client.call(Engine(actor.epoch, ENGINE, PRINT))
