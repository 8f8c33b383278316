"""Which names and texts hold secrets, and that none is in what is printed."""

from __future__ import annotations

import base64
import json
import pickle
import re
import shlex
from urllib.parse import quote, quote_plus, urlencode

import pytest

from astuner.contracts.errors import AstunerError, ConfigError, RunError, told
from astuner.contracts.secrets import (
    REMOVED,
    is_secret,
    is_secret_variable,
    redact,
    without_secrets,
    without_user,
    without_values,
)
from tests.table import table

NAMES = (
    "GITHUB_PAT", "AZURE_DEVOPS_EXT_PAT", "githubPat", "SSH_PASSPHRASE", "keyPassphrase", "GOOGLE_CREDENTIALS",
    "SENTRY_DSN", "DATABASE_URL", "databaseUri", "SESSION_COOKIE", "COOKIES", "SLACK_WEBHOOK", "SLACK_WEBHOOK_URL",
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "SSH_PRIVATE_KEY", "SSH_KEY", "deployKey",
    "apiKey", "OpenAIApiKey", "APIKey", "x-api-key", "APIKEY", "authToken", "access_tokens", "accesstoken",
    "dbpassword",
    "API_KEY_2", "API_KEY_PROD", "SECRET_KEY_BASE", "TOKEN1", "CLIENT_SECRET", "clientSecret", "signing-key", "JWT",
    "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_CONNECTION_STRING", "HF_TOKEN", "Authorization",
)  # fmt: skip
VARIABLES = ("NPM_AUTH", "SMTP_PASS", "MYSQL_PWD", "OPENAI_KEY", "STORAGE_SAS", "CARD_PIN", *NAMES)
ORDINARY = (
    "PATH", "PATTERN", "COMPAT", "KEYBOARD", "api_key_env", "token_env", "max_tokens", "eos_token", "tokenizer", "key",
    "keys", "id_key", "primary_key", "author", "authors", "monkey", "compass", "passenger", "secretary", "num_tokens",
    "stop_token", "micro_batch_tokens", "first_pass", "base_url", "path", "SSH_AUTH_SOCK", "tokens", "val_pass_n",
    "url", "webhook_timeout", "password_length", "output_pattern", "query_field", "experiment_name",
)  # fmt: skip


@table("name", NAMES)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)
    assert redact({name: "planted-1"}, {}) == {name: REMOVED}


@table("name", VARIABLES)
def test_variables_of_secrets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_secret_variable(name)
    monkeypatch.setenv(name, "planted-value-1")
    assert "planted" not in without_secrets("it said: planted-value-1!")


@table("name", ORDINARY)
def test_names_of_no_secrets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_secret(name)
    assert redact({name: "planted-1"}, {}) == {name: "planted-1"}


@table("name", ["PATH", "PATTERN", "COMPAT", "KEYBOARD", "MONKEY", "AUTHOR", "PWD_LIMIT", "TOKENIZER", "SSH_AUTH_SOCK"])
def test_variables_of_no_secrets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "ordinary-value")
    assert without_secrets("an ordinary-value") == "an ordinary-value"


SECRET = 'p@ss/wörd+1 "x"\\&<%='
SPELLINGS = {
    "plain": SECRET,
    "percent": quote(SECRET),
    "percent, all": quote(SECRET, safe=""),
    "percent, lower case": re.sub("%..", lambda match: match[0].lower(), quote(SECRET, safe="")),
    "plus": quote_plus(SECRET),
    "form": urlencode({"a": SECRET}),
    "JSON": json.dumps({"a": SECRET}),
    "JSON, not ASCII": json.dumps({"a": SECRET}, ensure_ascii=False),
    "JSON within JSON": json.dumps(json.dumps(SECRET)),
    "repr": repr({"a": SECRET}),
    "shell": shlex.join(["curl", SECRET]),
    "base64": base64.b64encode(SECRET.encode()).decode(),
    "base64, of a header": base64.b64encode(f"ada:{SECRET}".encode()).decode(),
    "base64, of a longer text": base64.b64encode(f"a{SECRET} and more".encode()).decode(),
    "base64, for URLs": base64.urlsafe_b64encode(SECRET.encode()).decode().rstrip("="),
    "hex": SECRET.encode().hex(),
    "within a word": f"x{SECRET}y",
}


@table("spelling", SPELLINGS)
def test_a_secret_is_removed_however_it_is_spelled(spelling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_PAT", SECRET)
    text = SPELLINGS[spelling]
    clean = without_secrets(f"before {text} after")
    assert REMOVED in clean
    assert clean.startswith("before ")
    assert clean.endswith(" after")
    assert len(clean.replace(REMOVED, "")) < 14 + max(len(text) - 20, 8)


URLS = (
    "https://ada:planted@host/v1", "https://planted@host", "redis://:planted@host:6379/0", "postgres://a:planted@h/db",
    "http://ada:pl/planted@host/v1", "http://ada:p#planted@host", "http://ada:p?planted@host", "http://a:p@planted@host",
    "https://host/v1?api_key=planted", "https://host/?a=1&token=planted&b=2", "https://host/#access_token=planted",
    "https://host/?X-Amz-Signature=planted&X-Amz-Credential=planted", "https://h/?sig=planted", "wss://h/?apikey=planted",
    "https://h/?key=planted", "https://h/?client_secret=planted;a=1", "mongodb+srv://u:planted@h/?ssl=true",
    "amqp://guest:planted@[::1]:5672/%2f", "see https://u:planted@h, and https://v:planted@i/?password=planted.",
)  # fmt: skip


@table("url", URLS)
def test_a_url_is_shown_without_secrets(url: str) -> None:
    assert "planted" not in without_user(url)
    assert "planted" not in str(ConfigError(f"e.yaml:1: {url!r} is no folder"))


@table(
    "text",
    [
        "https://host:8080/v1", "https://host/@user/page", "a@b.example", "https://host/?page=2&limit=10", "x == y",
        "https://host:80/a@b", "max_tokens=5", "the key = value", "Basic understanding of bearer tokens is required",
        "https://host/?sort_key=name&tokens=5", "file:///home/a@b/c", "lr=0.1; betas=0.9",
    ],
)  # fmt: skip
def test_an_ordinary_text_stays(text: str) -> None:
    assert without_secrets(text) == text


@table("variable", ["https://ada:planted%40x-1@host", "https://h/?token=planted@x-1", "redis://:planted@x-1@h"])
def test_a_password_in_a_variable_of_any_name_is_a_secret(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVER", variable)
    assert "planted" not in without_secrets("it refused planted@x-1")
    assert "planted" not in without_secrets("it refused planted%40x-1")


@table("value", ["short", "password", "changeme", ""])
def test_a_value_that_may_mean_something_else_is_left(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_PAT", value)
    assert without_secrets(f"a text with {value} in it") == f"a text with {value} in it"


def test_a_path_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", __file__)
    assert without_secrets(f"{__file__}:1") == f"{__file__}:1"


def test_headers_are_removed() -> None:
    assert without_secrets("Authorization: Bearer abc.def-123456") == f"Authorization: Bearer {REMOVED}"
    assert without_secrets("authorization: basic YWRhOnBsYW50ZWQ=") == f"authorization: basic {REMOVED}"


def test_lines_of_a_private_key_are_removed() -> None:
    key = "-----BEGIN KEY-----\nabcdefghijklmnopqrstuvwxyz0123456789\nABCDEFGHIJKLMNOPQRSTUVWXYZ\n-----END KEY-----\n"
    assert "abcdefghij" not in without_values("line: abcdefghijklmnopqrstuvwxyz0123456789", [key])
    assert "ABCDEFGHIJ" not in without_values(json.dumps(key), [key])


def test_no_error_of_ours_holds_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_PAT", "planted-value-1")
    for error in (
        RunError("planted-value-1"),
        ConfigError(["a: planted-value-1", "b"]),
        AstunerError(1, "planted-value-1"),
    ):
        assert "planted" not in f"{error} {error.args} {told(error)} {getattr(error, 'problems', ())}"
        again = pickle.loads(pickle.dumps(error))
        assert str(again) == str(error)
