"""The key folder: made once, private, checked; one clear line for whatever is wrong with it."""

import os
import stat
from pathlib import Path

import pytest

from configs.schema import Security
from tests.support.keys import KeyRing
from wire.errors import ConfigError
from wire.keys import ALLOWED, Known, client_keys, make_keys, read_allowed, server_keys


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_the_first_call_makes_all_that_a_run_needs(tmp_path: Path) -> None:
    before = os.umask(0o000)  # whatever the user's habits are
    try:
        assert make_keys(tmp_path / "a" / "keys", ["gpu-7"]) == ["learner", "actor", "gpu-7", "server"]
    finally:
        os.umask(before)
    folder = tmp_path / "a" / "keys"
    assert mode(folder) == 0o700
    assert {path.name for path in folder.iterdir()} == {"allowed.toml", *(
        f"{key}.{kind}" for key in ("server", "learner", "actor", "gpu-7") for kind in ("key", "key_secret"))}
    assert {mode(path) for path in folder.iterdir()} == {0o600}
    ring = KeyRing(folder)
    assert ring.server.allowed == {ring.client("learner").public: Known("learner", "learner"),
                                   ring.client("actor").public: Known("actor", "actor"),
                                   ring.client("gpu-7").public: Known("gpu-7", "actor")}
    assert ring.client("gpu-7").server == ring.server.public
    assert len({ring.server.secret, *(ring.client(name).secret for name in ("learner", "actor", "gpu-7"))}) == 4


def test_a_later_call_adds_and_changes_nothing(tmp_path: Path) -> None:
    ring = KeyRing(tmp_path / "keys")
    before = (ring.server, ring.client("actor"))
    assert make_keys(ring.folder, ["b", "actor"]) == ["b"]
    assert make_keys(ring.folder, []) == []
    assert (ring.server.secret, ring.client("actor")) == (before[0].secret, before[1])
    assert {known.name for known in ring.server.allowed.values()} == {"learner", "actor", "b"}


def test_who_is_taken_off_the_list_stays_off(tmp_path: Path) -> None:
    ring = KeyRing(tmp_path / "keys")
    text = (ring.folder / ALLOWED).read_text()
    (ring.folder / ALLOWED).write_text(text[:text.index("[actor]")])
    make_keys(ring.folder, ["b"])
    assert {known.name for known in ring.server.allowed.values()} == {"learner", "b"}


def test_a_killed_call_is_finished_by_the_next(tmp_path: Path) -> None:
    ring = KeyRing(tmp_path / "keys")
    for name in ("server.key", "server.key_secret", "actor.key", "actor.key_secret"):
        (ring.folder / name).unlink()
    (ring.folder / ALLOWED).write_text("")
    assert make_keys(ring.folder, []) == ["actor", "server"]
    assert {known.name for known in ring.server.allowed.values()} == {"learner", "actor"}


@pytest.mark.parametrize("name", ["server", "", "A", "a.b", "../x", "a/b", "x" * 33, "a b"])
def test_odd_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="key name"):
        make_keys(tmp_path / "keys", [name])
    assert not (tmp_path / "keys").exists()


def test_what_others_can_read_is_refused_at_start(tmp_path: Path) -> None:
    ring = KeyRing(tmp_path / "keys")
    for path in (ring.folder, ring.folder / "actor.key_secret", ring.folder / ALLOWED):
        good = mode(path)
        for bit in (0o040, 0o020, 0o004, 0o001):
            path.chmod(good | bit)
            for check in (lambda: ring.server, lambda: ring.client("learner"), lambda: make_keys(ring.folder, [])):
                with pytest.raises(ConfigError, match=f"others have access to {path}: chmod {good:o} {path}$"):
                    check()
        path.chmod(good)
    assert ring.server


def test_links_and_other_owners_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = KeyRing(tmp_path / "keys")
    (ring.folder / "actor.key_secret").rename(tmp_path / "elsewhere")
    (ring.folder / "actor.key_secret").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="actor.key_secret is not a plain file"):
        ring.client("actor")
    (ring.folder / "actor.key_secret").unlink()
    (tmp_path / "link").symlink_to(ring.folder)
    with pytest.raises(ConfigError, match="link is not a plain folder"):
        server_keys(Security(keys=str(tmp_path / "link")))
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match="belongs to another user"):
        ring.server  # noqa: B018


@pytest.mark.parametrize(("text", "complaint"), [
    ("[a]\nrole = 'root'\npublic_key = 'KEY'", r"\[a\] must be"),
    ("[a]\npublic_key = 'KEY'", r"\[a\] must be"),
    ("[a]\nrole = 'actor'\npublic_key = 'KEY'\nmore = 1", r"\[a\] must be"),
    ("['a.b']\nrole = 'actor'\npublic_key = 'KEY'", r"\[a.b\] must be"),
    ("a = 1", r"\[a\] must be"),
    ("[a]\nrole = 'actor'\npublic_key = 'short'", "not a key"),
    ("[a]\nrole = 'actor'\npublic_key = '~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~'", "not a key"),
    ("[a]\nrole = 'actor'\npublic_key = '########################################'", "not a key"),
    ("[a]\nrole = 'actor'\npublic_key = 'KEY'\n[b]\nrole = 'learner'\npublic_key = 'KEY'", r"\[b\] and \[a\] have the same key"),
    ("[a", "allowed.toml: "),
    ("a = " + "[" * 100_000, "allowed.toml: "),
])
def test_a_wrong_list_is_one_clear_line(tmp_path: Path, text: str, complaint: str) -> None:
    ring = KeyRing(tmp_path / "keys")
    (ring.folder / ALLOWED).write_text(text.replace("KEY", ring.client("actor").public.decode()))
    with pytest.raises(ConfigError, match=complaint):
        read_allowed(ring.folder)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    assert server_keys(Security()) is None
    assert client_keys(Security(), "actor") is None
    with pytest.raises(ConfigError, match="make it with `leeway keys"):
        server_keys(Security(keys=str(tmp_path / "none")))
    ring = KeyRing(tmp_path / "keys")
    with pytest.raises(ConfigError, match="nobody.key_secret"):
        ring.client("nobody")
    (ring.folder / "server.key").unlink()
    with pytest.raises(ConfigError, match="server.key: .*copy it from replay's machine"):
        ring.client("actor")
    (ring.folder / "server.key_secret").write_text("curve\n    public-key = \"short\"\n    secret-key\n")
    with pytest.raises(ConfigError, match=r"server.key_secret: list index out of range: make the key with"):
        ring.server  # noqa: B018
    (ring.folder / "server.key_secret").write_text("curve\n    public-key = \"short\"\n")
    with pytest.raises(ConfigError, match="not a key"):
        ring.server  # noqa: B018
