-- The store of one run: <run>/replay.sqlite. Documented in docs/store.md. Schema version in PRAGMA user_version: raised with every change here.
-- Payloads (tokens, log-probs, columns) are BLOBs with a digest each; retention sets them to NULL and leaves the row.

CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);

-- One row per attempt of an order. group_id = order_id.attempt
CREATE TABLE groups (
    group_id    TEXT PRIMARY KEY,
    order_id    TEXT NOT NULL,
    attempt     INTEGER NOT NULL,
    purpose     TEXT NOT NULL,              -- train | eval | greedy_baseline
    prompt_id   TEXT NOT NULL,
    n           INTEGER NOT NULL,
    state       TEXT NOT NULL,              -- queued | granted | complete | leased | trained | dropped | expired | lost | evaluated
    reason      TEXT,                       -- of dropped, expired and lost
    actor       TEXT,
    grant_seq   INTEGER,                    -- order of granting; leases follow it
    granted_at_version INTEGER,             -- the committed version when it was granted
    oldest_version     INTEGER,             -- of its oldest token, once known
    update_id   INTEGER,
    eval_id     INTEGER,
    work_order  TEXT NOT NULL,              -- the WorkOrder as JSON
    work_order_digest TEXT NOT NULL         -- of its bytes
);
CREATE INDEX groups_by_state ON groups (state, grant_seq);
CREATE INDEX groups_by_eval ON groups (eval_id) WHERE eval_id IS NOT NULL;

-- One row per stored training rollout. The books count these by state.
CREATE TABLE rollouts (
    rollout_id  TEXT PRIMARY KEY,           -- order_id.attempt.sample
    group_id    TEXT NOT NULL REFERENCES groups,
    sample      INTEGER NOT NULL,
    state       TEXT NOT NULL,              -- buffered | leased | trained | dropped | expired | lost
    reason      TEXT,
    update_id   INTEGER,                    -- of the update that trained it
    actor       TEXT NOT NULL,
    response_len   INTEGER NOT NULL,
    oldest_version INTEGER NOT NULL,
    newest_version INTEGER NOT NULL,
    reward      REAL,                       -- NULL: not scored
    failure     TEXT,                       -- why not
    head        TEXT NOT NULL,              -- the RolloutHead as JSON: spans, sampling, verdict, fingerprint, times
    head_digest TEXT NOT NULL,              -- of the head's bytes
    payload     BLOB,                       -- prompt ids, response ids, mu, top-k: wire/record.py
    payload_digest TEXT NOT NULL,
    stored_at   REAL NOT NULL               -- wall clock, for people
);
CREATE INDEX rollouts_by_group ON rollouts (group_id);
CREATE INDEX rollouts_by_state ON rollouts (state, reason);
CREATE INDEX rollouts_by_update ON rollouts (update_id) WHERE update_id IS NOT NULL;

-- Samples that came to nothing (no token was made), or were quarantined
CREATE TABLE failures (group_id TEXT NOT NULL, sample INTEGER NOT NULL, reason TEXT NOT NULL, PRIMARY KEY (group_id, sample));

-- One row per span of a training rollout; filled once by the learner, never replaced
CREATE TABLE spans (
    rollout_id  TEXT NOT NULL REFERENCES rollouts,
    span        INTEGER NOT NULL,
    version     INTEGER NOT NULL,
    start       INTEGER NOT NULL,
    "end"       INTEGER NOT NULL,
    kv_clean    INTEGER NOT NULL,
    source      TEXT,                       -- NULL: not scored yet. resident | snapshot | old_model | interrupted | missing
    weights_digest TEXT,
    trainer     TEXT,                       -- trainer fingerprint as JSON
    rows        INTEGER, width INTEGER, row INTEGER,   -- scoring plan
    old         BLOB,                       -- float32, end - start of them
    old_digest  TEXT,
    anchor_digest TEXT,                     -- of all that is said of the span's anchor, and of old_digest: replay/sound.py
    PRIMARY KEY (rollout_id, span)
) WITHOUT ROWID;
CREATE INDEX spans_unscored ON spans (version) WHERE source IS NULL;

CREATE TABLE versions (
    version     INTEGER PRIMARY KEY,
    parent      INTEGER,
    update_id   INTEGER,                    -- NULL: the initial weights, or a fork
    path        TEXT NOT NULL,              -- relative to the run directory
    manifest_digest TEXT NOT NULL,
    weights_digest  TEXT NOT NULL,
    state       TEXT NOT NULL,              -- live | orphaned (by a fork)
    retained    INTEGER NOT NULL DEFAULT 1, -- 0: retention removed the files
    committed_at REAL NOT NULL
);

CREATE TABLE updates (
    update_id   INTEGER PRIMARY KEY,
    version_in  INTEGER NOT NULL,
    version_out INTEGER NOT NULL,
    skipped     INTEGER NOT NULL,
    state       TEXT NOT NULL,              -- committed | lost
    record      TEXT NOT NULL,              -- the UpdateRecord as JSON
    record_digest TEXT NOT NULL,            -- of the record's JSON bytes
    metrics     TEXT NOT NULL,              -- its line of metrics.jsonl
    committed_at REAL NOT NULL
);

-- Per trained token, in the order of the record's rollout_ids: old, prox, cur, weight (f4), keep, old_source (u1)
CREATE TABLE update_columns (
    update_id INTEGER NOT NULL REFERENCES updates, name TEXT NOT NULL, dtype TEXT NOT NULL, data BLOB, digest TEXT NOT NULL,
    PRIMARY KEY (update_id, name)
);

CREATE TABLE checkpoints (
    version INTEGER PRIMARY KEY, update_id INTEGER, path TEXT NOT NULL, manifest_digest TEXT NOT NULL,
    state TEXT NOT NULL                     -- complete | orphaned | removed
);

CREATE TABLE evals (
    eval_id INTEGER PRIMARY KEY, version INTEGER NOT NULL, updates INTEGER NOT NULL,
    state TEXT NOT NULL,                    -- pending | done | lost (its version was orphaned before it was done)
    sampled REAL, greedy REAL, failed INTEGER, committed_at REAL
);

-- What is outside the books: answers of evaluations, and the greedy baselines of training groups (ReMax): eval_id 0, version that of the
-- oldest token, rollout_id ends with the group's n
CREATE TABLE eval_rollouts (
    rollout_id TEXT PRIMARY KEY, eval_id INTEGER NOT NULL, group_id TEXT NOT NULL, purpose TEXT NOT NULL, version INTEGER NOT NULL,
    response_len INTEGER NOT NULL, reward REAL, failure TEXT, head TEXT NOT NULL, head_digest TEXT NOT NULL,
    payload BLOB, payload_digest TEXT NOT NULL
);
CREATE INDEX eval_rollouts_by_eval ON eval_rollouts (eval_id);

CREATE TABLE actors (
    name TEXT PRIMARY KEY, epoch INTEGER NOT NULL, confirmed INTEGER NOT NULL, probe_mean REAL, probe_max REAL, fingerprint TEXT
);
CREATE TABLE fingerprints (id TEXT PRIMARY KEY, body TEXT NOT NULL);

-- duplicates_refused, quarantined, refused_closed, aborted_without_token, anchors_refused, tokens_generated, ...
CREATE TABLE counters (name TEXT PRIMARY KEY, value REAL NOT NULL);

-- Poisoned rollouts, with their evidence. Never trained on.
CREATE TABLE quarantine (
    id INTEGER PRIMARY KEY, rollout_id TEXT NOT NULL, actor TEXT NOT NULL, reason TEXT NOT NULL, head TEXT NOT NULL, payload BLOB,
    stored_at REAL NOT NULL
);

-- Append-only. hash = digest(prev | seq | kind | body); the body names ids and the digests of the payloads it speaks of.
CREATE TABLE ledger (
    seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, body TEXT NOT NULL, prev TEXT NOT NULL, hash TEXT NOT NULL
);

-- For people
CREATE VIEW books AS
    SELECT (SELECT CAST(value AS INTEGER) FROM counters WHERE name = 'produced') AS produced, state, reason, count(*) AS rollouts, sum(response_len) AS tokens
    FROM rollouts GROUP BY state, reason;
CREATE VIEW trained_staleness AS
    SELECT u.update_id, u.version_in, r.rollout_id, u.version_in - r.oldest_version AS staleness, r.reward, r.response_len
    FROM rollouts r JOIN updates u USING (update_id) WHERE r.state = 'trained';
