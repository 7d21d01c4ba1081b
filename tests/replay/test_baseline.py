"""The probe's baseline of a run: the first mean difference that an engine of a fingerprint proved, whoever asks and whenever."""

import math
from typing import Any

import msgspec
import pytest

from tests.replay.conftest import Stage
from tests.support.replay import PRINT, LightActor, notice
from wire.errors import ProtocolError
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
