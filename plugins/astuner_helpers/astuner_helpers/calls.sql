-- What helper models were asked, what it took, and what they answered.

CREATE TABLE calls (
    id INTEGER PRIMARY KEY,
    time REAL NOT NULL,             -- when it was sent, in seconds since 1970
    scope TEXT NOT NULL,            -- what budgets are counted for: a run folder, a command's output folder
    name TEXT NOT NULL,             -- the helper model's, in its config
    server TEXT NOT NULL,
    model TEXT NOT NULL,
    purpose TEXT NOT NULL,
    key TEXT NOT NULL,              -- of the question, as in answers
    state TEXT NOT NULL,            -- sent, answered, failed, lost (its process ended meanwhile), cached
    process TEXT NOT NULL,          -- pid and start time
    prompt_tokens INTEGER NOT NULL, -- while it is sent, and where the server says nothing: an estimate
    completion_tokens INTEGER NOT NULL,
    estimated INTEGER NOT NULL,     -- whether the tokens are an estimate
    cost REAL NOT NULL,
    seconds REAL,
    error TEXT
);
CREATE INDEX calls_of_a_model ON calls (server, model, time) WHERE state <> 'cached';
CREATE INDEX calls_under_way ON calls (scope, name) WHERE state = 'sent';
CREATE INDEX calls_of_a_scope ON calls (scope, name, id);
CREATE TABLE totals (
    scope TEXT NOT NULL,
    name TEXT NOT NULL,
    calls INTEGER NOT NULL DEFAULT 0,
    cached INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0,
    estimated INTEGER NOT NULL DEFAULT 0,
    prompt_tokens INTEGER NOT NULL DEFAULT 0,
    completion_tokens INTEGER NOT NULL DEFAULT 0,
    cost REAL NOT NULL DEFAULT 0,
    PRIMARY KEY (scope, name)
) WITHOUT ROWID;
CREATE TABLE answers (
    key TEXT PRIMARY KEY,
    time REAL NOT NULL,
    size INTEGER NOT NULL,
    value BLOB NOT NULL
);
CREATE INDEX answers_by_age ON answers (time, size);
