"""What has to hold of a run's tokens, and the name of each way in which it may not."""

from __future__ import annotations

import contextlib
import json
import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.checker.folder import Credit, Episode, Folder, Turn, Unreadable, Words, episode

KINDS = {
    "unreadable": "a row or a file is not as the pages say",
    "prefix": "a prompt does not begin with the recorded tokens of the turn that it continues",
    "template": "the tokens of a prompt do not read as the chat template writes that conversation",
    "retokenised": "tokens were made again of text: they are not the recorded ones, or not the tokenizer's",
    "reply": "a message is not what its tokens say",
    "forged": "a text became control tokens",
    "count": "a number of tokens or log-probabilities is another than the log says",
    "logprob": "a log-probability is none, or not that of the token which was trained",
    "trained_twice": "a generated token is in the loss masks of two samples",
    "masked_prompt": "a loss mask covers a token that no policy generated",
    "not_trained": "a generated token of a credited episode is in no loss mask, and nothing says why",
    "credit": "a version, reward or advantage belongs to another sample",
    "certificate": "the certificate counts otherwise",
    "key": "a file has what looks like a key",
}
KEYS = re.compile(
    rb"sk-[A-Za-z0-9_-]{20,}|[Bb]earer [A-Za-z0-9_.~+/-]{20,}|\bhf_[A-Za-z0-9]{30,}|\bgh[pousr]_[A-Za-z0-9]{30,}"
    rb"|\bAKIA[A-Z0-9]{16}\b|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
NEAR = 0.02
"""How far the trainer's log-probability of a token may be from the engine's, in nats, with the same weights."""


@dataclass(frozen=True)
class Problem:
    kind: str
    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}: {self.what}"


@dataclass
class Report:
    problems: list[Problem] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, where: str, what: str) -> None:
        assert kind in KINDS
        self.problems.append(Problem(kind, where, what))

    def kinds(self) -> set[str]:
        return {problem.kind for problem in self.problems}


@dataclass
class Sample:
    """A path from a root to a leaf, and which of its turns are trained in it."""

    path: list[Turn]
    trained: list[Turn]

    @property
    def tokens(self) -> int:
        return self.path[-1].prompt_tokens + len(self.path[-1].response)

    @property
    def trained_tokens(self) -> int:
        return sum(len(turn.response) for turn in self.trained)

    def ids(self) -> list[int]:
        return [id for turn in self.path for id in turn.tail + turn.response]

    def mask(self) -> list[int]:
        """1 where a turn of ``trained`` spoke."""
        mine = {turn.index for turn in self.trained}
        return [
            bit for turn in self.path for bit in [0] * len(turn.tail) + [int(turn.index in mine)] * len(turn.response)
        ]


def check(run: Path, tokenizer: Path | None = None, samples: Path | None = None) -> Report:
    """Everything that can be said about the run in that folder.

    ``samples`` is what ``astuner export RUN --to tokens --min-reward=-1e9`` wrote: then each loss mask is compared
    token by token, and else as the numbers that ``credit`` has of it.
    """
    report, folder = Report(), Folder(run, tokenizer)
    try:
        credit = defaultdict(list)
        for row in folder.credit():
            credit[row.episode].append(row)
        exported = _exported(samples, report) if samples else None
        _once(credit, report)
        seen, generated, metrics = set(), Counter[str](), folder.metrics()
        for name, data in folder.rows():
            seen.add(name)
            _no_key(data, f"the row of {name}", report)
            try:
                found = episode(data)
            except (ValueError, LookupError, TypeError, ArithmeticError) as error:
                report.add("unreadable", name, f"{type(error).__name__}: {error}")
                continue
            report.counts["episodes"] += 1
            _Turns(found, folder, report).check()
            made = list(paths(found))
            _credited(found, made, credit.get(name, []), metrics, report)
            if exported is not None and name in exported:
                _masks(found, made, exported.pop(name), folder, report)
            if found.split == "train" and found.stop_reason != "cancelled":
                generated["generated"] += sum(len(turn.response) for turn in found.turns)
        for name in sorted(set(credit) - seen):
            report.add("credit", name, "was credited, and the log has no such episode")
        for name in sorted(exported or ()):
            report.add("credit", name, "was exported, and the log has no such episode")
        _groups(credit, folder, report)
        _certificate(folder, credit, generated, report)
        _files(run, report)
    finally:
        folder.close()
    return report


class _Turns:
    """One episode's turns: lengths, texts and log-probabilities."""

    def __init__(self, found: Episode, folder: Folder, report: Report) -> None:
        self._episode, self._folder, self._report = found, folder, report

    def check(self) -> None:
        for turn in self._episode.turns:
            self._report.counts["turns"] += 1
            self._report.counts["tokens generated"] += len(turn.response)
            where = f"{self._episode.name}, turn {turn.index}"

            def say(kind: str, what: str, where: str = where) -> None:
                self._report.add(kind, where, what)

            self._counts(turn, say)
            chain = self._episode.chain(turn)
            if not chain:
                say("prefix", f"it continues turn {turn.continues}, which is none before it")
                continue
            if self._prefix(turn, chain, say):
                self._texts(turn, chain, say)

    def _counts(self, turn: Turn, say: Callable[[str, str], None]) -> None:
        if len(turn.response) != turn.response_tokens:
            say("count", f"{len(turn.response)} response ids, and response_tokens says {turn.response_tokens}")
        if len(turn.logprobs) != len(turn.response):
            say("count", f"{len(turn.logprobs)} log-probabilities of {len(turn.response)} generated tokens")
        wrong = [at for at, value in enumerate(turn.logprobs) if not math.isfinite(value) or value > 1e-4]
        if wrong:
            say("logprob", f"number {wrong[0]} is {turn.logprobs[wrong[0]]}, which is no log-probability")
        self._report.counts["log-probabilities"] += len(turn.logprobs)

    def _prefix(self, turn: Turn, chain: list[Turn], say: Callable[[str, str], None]) -> bool:
        if len(chain) == 1:
            whole = len(turn.tail)
        else:
            before = chain[-2]
            whole = before.prompt_tokens + len(before.response) + len(turn.tail)
            if before.agent != turn.agent or before.policy != turn.policy:
                say(
                    "prefix", f"it continues turn {before.index} of agent {before.agent!r} and policy {before.policy!r}"
                )
                return False
            self._report.counts["turns continued"] += 1
        if whole != turn.prompt_tokens:
            named = "the branch" if len(chain) == 1 else f"turn {chain[-2].index} and what follows it"
            say("prefix", f"its prompt has {turn.prompt_tokens} tokens, and {named} {whole}")
        return whole == turn.prompt_tokens

    def _texts(self, turn: Turn, chain: list[Turn], say: Callable[[str, str], None]) -> None:
        words = self._folder.words(turn.policy)
        if words.template is None:
            raise Unreadable("no checkpoint here has a chat template: name a folder with one, --tokenizer DIR")
        messages: list[dict[str, Any]] = []
        for one in chain:
            messages += [*one.request, *([one.reply] if one is not turn else [])]
        tools = next((one.tools for one in reversed(chain) if one.tools is not None), None)
        ids: list[int] = []
        pieces: list[str] = []
        for one in chain:
            pieces.append(words.behind(ids, one.tail))
            ids += one.tail
            if one is not turn:
                ids += one.response
        reply = words.behind(ids, turn.response)
        self._forged(turn, chain, words, pieces[-1], say)
        written, why = [], "the template writes nothing"
        for variant in _spellings(messages):
            try:
                written.append((variant, words.render(variant, tools, asking=True)))
            except Exception as error:  # a template may raise anything, and the report says what
                why = f"the template does not write it: {type(error).__name__}: {error}"
        if not written:
            say("template", why)
            return
        whole = words.text(ids)
        exact = next((text for _, text in written if text == whole), None)
        if exact is not None:
            self._report.counts["prompts written by the template"] += 1
        elif any(_in_order(text, pieces) for _, text in written):
            # docs/tokens.md: the prompt has the reply's own tokens, where the template would write it otherwise
            self._report.counts["prompts but for the replies' own spelling"] += 1
        else:
            say(
                "template", _difference(min((text for _, text in written), key=lambda text: _apart(text, whole)), whole)
            )
            return
        special = set(words.special.values())
        plain = not any(token in text for token in special for text in _strings([messages, tools]))
        if len(chain) == 1 and exact is not None and plain:
            if words.tokenizer.encode(whole, add_special_tokens=False).ids != ids:
                say("retokenised", "the tokenizer makes other tokens of the same text")
            self._report.counts["prompts encoded again"] += 1
        self._reply(turn, words, written, tools, reply, say)

    def _reply(
        self,
        turn: Turn,
        words: Words,
        written: list[tuple[list[dict[str, Any]], str]],
        tools: list[Any] | None,
        said: str,
        say: Callable[[str, str], None],
    ) -> None:
        """The message is what the tokens say: as the template writes it, or each part of it word for word."""
        for messages, prompt in written:
            for variant in _spellings([*messages, turn.reply]):
                try:
                    text = words.render(variant, tools, asking=False)
                except Exception:  # a template may refuse a reply, whose parts are compared then
                    continue
                if said and text.startswith(prompt) and _bare(text[len(prompt) :]).startswith(_bare(said)):
                    self._report.counts["replies written by the template"] += 1
                    return
        self._report.counts["replies spelled otherwise"] += 1
        bare = _bare(said)
        lines = map(_bare, str(turn.reply.get("content") or "").splitlines())  # a call may be between two of them
        if not _in_order(bare, ["", *lines, ""]):
            say("reply", f"its text is {turn.reply.get('content')!r}, and its tokens say {said!r}")
        if _bare(str(turn.reply.get("reasoning_content") or "")) not in bare:
            say("reply", f"its reasoning is {turn.reply['reasoning_content']!r}, and its tokens say {said!r}")
        for call in turn.reply.get("tool_calls") or ():
            function = call["function"]
            parts = [function["name"], *_values(function["arguments"])]
            if missing := next((part for part in parts if _bare(part) not in bare), None):
                say("reply", f"it calls {function['name']} with {missing!r}, and its tokens say {said!r}")

    def _forged(self, turn: Turn, chain: list[Turn], words: Words, text: str, say: Callable[[str, str], None]) -> None:
        """Control tokens are the template's: those that stand in a content are as many fewer ids than places."""
        told = list(_strings([turn.request, turn.tools if len(chain) == 1 else None]))
        for id, token in words.special.items():
            within = sum(one.count(token) for one in told)
            if within:
                self._report.counts["control tokens in contents"] += within
                if (real := turn.tail.count(id)) > text.count(token) - within:
                    say("forged", f"{token!r} stands in a content {within} times, and is {real} control tokens")


def paths(found: Episode) -> Iterator[Sample]:
    """The samples of an episode: each path to a leaf, and each turn trained in the first that has it."""
    turns = [turn for turn in found.turns if found.chain(turn)]
    counts = {turn.index for turn in turns if turn.trained and not turn.lost and turn.response}
    useful = {one.index for turn in turns if turn.index in counts for one in found.chain(turn)}
    inner = {turn.continues for turn in turns if turn.index in useful}
    done: set[int] = set()
    for leaf in turns:
        if leaf.index in useful - inner:
            path = found.chain(leaf)
            trained = [turn for turn in path if turn.index in counts - done]
            done |= {turn.index for turn in trained}
            yield Sample(path, trained)


def _once(credit: dict[str, list[Credit]], report: Report) -> None:
    for name, rows in credit.items():
        steps = sorted({row.step for row in rows})
        if len(steps) > 1:
            report.add("trained_twice", name, f"was credited in the steps {steps}")


def _credited(
    found: Episode, made: list[Sample], rows: list[Credit], metrics: dict[int, dict[str, Any]], report: Report
) -> None:
    """What ``credit`` has of an episode belongs to its paths."""
    if len({row.step for row in rows}) > 1:
        rows = [row for row in rows if row.step == min(row.step for row in rows)]
    left = list(made)
    for row in rows:
        where = f"{found.name}, sample {row.sample}"
        report.counts["samples"] += 1
        if found.split != "train":
            report.add("credit", where, f"is of a {found.split} episode")
        same = [one for one in left if one.path[-1].agent == row.agent and one.tokens == row.tokens]
        fits = next((one for one in same if one.trained_tokens == row.trained_tokens), None)
        if fits is None:
            _misfit(row, same, [one for one in made if one not in left], where, report)
            left = [one for one in left if not same or one is not same[0]]
            continue
        left.remove(fits)
        report.counts["tokens trained"] += row.trained_tokens
        if row.version != min(turn.version for turn in fits.path):
            report.add("credit", where, f"version {row.version}, of turns of {[turn.version for turn in fits.path]}")
        reward = found.rewards.get(row.agent, found.rewards.get(row.role, found.reward))
        if reward is None or row.reward is None or not math.isclose(row.reward, reward, rel_tol=1e-6, abs_tol=1e-9):
            report.add("credit", where, f"reward {row.reward}, where the episode's is {reward}")
        _trainers(row, fits, metrics.get(row.step, {}), where, report)
    if rows:
        agents = {row.agent for row in rows}
        for one in left:
            if one.path[-1].agent in agents:  # agents without a reward, say, have no credit at all
                report.counts["samples left out"] += 1
        for agent in agents:
            given = {row.advantage for row in rows if row.agent == agent}
            if len(given) > 1:
                report.add(
                    "credit", found.name, f"the samples of {agent!r} have the advantages {sorted(map(str, given))}"
                )


def _misfit(row: Credit, same: list[Sample], before: list[Sample], where: str, report: Report) -> None:
    if not same:
        report.add(
            "retokenised", where, f"the trainer was given {row.tokens} tokens, and no path of {row.agent!r} has so many"
        )
        return
    best = same[0]
    over = row.trained_tokens - best.trained_tokens
    done = {turn.index for one in before for turn in one.trained}
    again = sum(len(turn.response) for turn in best.path if turn.index in done)
    if over and over == again:
        report.add("trained_twice", where, f"{over} tokens of it are trained in an earlier sample")
    elif over > 0:
        report.add(
            "masked_prompt", where, f"{row.trained_tokens} tokens are trained, {best.trained_tokens} are its own"
        )
    else:
        report.add("not_trained", where, f"{row.trained_tokens} tokens are trained of {best.trained_tokens} generated")


def _trainers(row: Credit, fits: Sample, metrics: dict[str, Any], where: str, report: Report) -> None:
    """The trainer computed the log-probability of the very tokens, in the very context, that the engine drew."""
    if row.trainer_logprobs is None:
        return
    engine = [value for turn in fits.trained for value in turn.logprobs]
    if len(row.trainer_logprobs) != row.trained_tokens:
        report.add(
            "count", where, f"{len(row.trainer_logprobs)} trainer_logprobs of {row.trained_tokens} trained tokens"
        )
    elif len(engine) == len(row.trainer_logprobs) and metrics.get("staleness/max") == 0:
        apart = [abs(one - other) for one, other in zip(engine, row.trainer_logprobs, strict=True)]
        report.counts["log-probabilities computed again"] += len(apart)
        if apart and not max(apart) <= NEAR:
            at = apart.index(max(apart))
            said = f"{engine[at]:.4f} of the engine and {row.trainer_logprobs[at]:.4f} of the trainer"
            report.add("logprob", where, f"trained token {at} has {said}")


def _masks(
    found: Episode, made: list[Sample], exported: list[tuple[list[int], list[int]]], folder: Folder, report: Report
) -> None:
    """The exported samples are the paths, and their masks cover each generated token once."""
    left = list(made)
    covered: Counter[tuple[int, int]] = Counter()
    for number, (ids, mask) in enumerate(exported):
        where = f"{found.name}, exported sample {number}"
        fits = next((one for one in left if one.ids() == ids), None)
        if fits is None:
            words = folder.words(found.turns[0].policy)
            same = any(words.text(one.ids()) == words.text(ids) for one in left)
            report.add("retokenised" if same else "credit", where, "its tokens are those of no path")
            continue
        left.remove(fits)
        if len(mask) != len(ids):
            report.add("count", where, f"a mask of {len(mask)} for {len(ids)} tokens")
            continue
        at = 0
        for turn in fits.path:
            if any(mask[at : at + len(turn.tail)]):
                report.add("masked_prompt", where, f"its mask covers the prompt of turn {turn.index}")
            at += len(turn.tail)
            for place, bit in enumerate(mask[at : at + len(turn.response)]):
                covered[turn.index, place] += bit
            at += len(turn.response)
        report.counts["masks compared"] += 1
    for turn in {turn.index: turn for one in made for turn in one.trained}.values():
        times = {covered[turn.index, place] for place in range(len(turn.response))}
        if max(times) > 1:
            report.add("trained_twice", f"{found.name}, turn {turn.index}", f"tokens of it are in {max(times)} masks")
        if min(times) < 1 and not left:
            report.add("not_trained", f"{found.name}, turn {turn.index}", "tokens of it are in no mask")
    for index, place in covered:
        turn = next(turn for turn in found.turns if turn.index == index)
        if covered[index, place] and (turn.lost or not turn.trained):
            why = "reached nobody" if turn.lost else "is of an agent that does not train"
            report.add("masked_prompt", f"{found.name}, turn {index}", f"a mask covers a reply that {why}")
            break


def _exported(path: Path, report: Report) -> dict[str, list[tuple[list[int], list[int]]]]:
    found: dict[str, list[tuple[list[int], list[int]]]] = defaultdict(list)
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            found[row["episode_id"]].append((row["input_ids"], row["loss_mask"]))
        except (ValueError, LookupError, TypeError) as error:
            report.add("unreadable", f"{path.name}:{number}", f"{type(error).__name__}: {error}")
    return found


def _groups(credit: dict[str, list[Credit]], folder: Folder, report: Report) -> None:
    """Advantages follow rewards within a group and role; those of ``grpo`` are computed again."""
    algorithm = (folder.settings.get("trainer_common") or {}).get("algorithm") or {}
    formula = algorithm.get("adv_estimator") == "grpo" and algorithm.get("norm_adv_by_std", True)
    groups: dict[tuple[int, str, str], dict[tuple[str, str], tuple[float, float]]] = defaultdict(dict)
    for rows in credit.values():
        for row in rows:
            if row.reward is not None and row.advantage is not None:
                key = (row.step, row.group, row.role)
                groups[key][row.episode, row.agent] = (row.reward, row.advantage)
    for (step, group, role), members in groups.items():
        where = f"group {group} of step {step}, role {role!r}"
        pairs = sorted(members.values())
        for (low, of_low), (high, of_high) in pairwise(pairs):
            if (low == high and not math.isclose(of_low, of_high, abs_tol=1e-6)) or (low < high and of_low > of_high):
                report.add("credit", where, f"reward {low} has advantage {of_low}, and reward {high} has {of_high}")
                break
        else:
            rewards = [reward for reward, _ in pairs]
            report.counts["groups"] += 1
            if formula and len(pairs) > 1 and len({agent for _, agent in members}) == 1:
                mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
                for reward, advantage in pairs:
                    if not math.isclose(advantage, (reward - mean) / (deviation + 1e-6), abs_tol=1e-3):
                        report.add("credit", where, f"grpo's advantage of {reward} among {rewards} is not {advantage}")
                        break


def _certificate(folder: Folder, credit: dict[str, list[Credit]], log: Counter[str], report: Report) -> None:
    path = folder.path / "certificate.json"
    if not path.is_file():
        return
    tokens = json.loads(path.read_text())["tokens"]
    rows = [row for rows in credit.values() for row in rows]
    trained = sum(row.trained_tokens for row in rows)
    if tokens["trained"] != trained:
        report.add("certificate", path.name, f"{tokens['trained']} tokens trained, and credit has {trained}")
    parts = tokens["trained"] + tokens["of_untrained_agents"] + sum(tokens["left_out"].values())
    if tokens["generated"] != parts:
        report.add("certificate", path.name, f"{tokens['generated']} tokens generated, and its parts are {parts}")
    if tokens["generated"] != log["generated"]:
        said = f"{tokens['generated']} tokens generated, and the training episodes of the log have {log['generated']}"
        report.add("certificate", path.name, said)


def _files(run: Path, report: Report) -> None:
    for path in sorted(run.rglob("*")):
        if path.is_file() and not path.is_symlink():
            report.counts["files searched for keys"] += 1
            _no_key(path.read_bytes(), str(path.relative_to(run)), report)


def _no_key(data: bytes, where: str, report: Report) -> None:
    if found := KEYS.search(data):
        report.add("key", where, f"at byte {found.start()} stands what begins with {found.group()[:6].decode()!r}")


def _spellings(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The messages with the arguments of calls as the text they are in the log, and as what that text says."""
    yield messages
    if any(message.get("tool_calls") for message in messages):
        yield [_with_objects(message) for message in messages]


def _with_objects(message: dict[str, Any]) -> dict[str, Any]:
    calls = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        with contextlib.suppress(ValueError):  # else it stays the text that it is
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls} if calls else message


def _values(arguments: Any) -> Iterable[str]:
    """The texts and numbers of a call's arguments, or what stands there if it is no JSON."""
    try:
        found = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return [str(arguments)]
    return [one if isinstance(one, str) and one.isalnum() else json.dumps(one)[1:-1] for one in _strings(found)]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in value.items():
            yield from _strings(list(one))
    elif isinstance(value, list):
        for one in value:
            yield from _strings(one)


def _in_order(text: str, pieces: list[str]) -> bool:
    """Whether ``text`` begins with the first piece, ends with the last, and has the others between them in order."""
    if len(pieces) == 1:
        return text == pieces[0]
    if not text.startswith(pieces[0]):
        return False
    at = len(pieces[0])
    for piece in pieces[1:-1]:
        if (found := text.find(piece, at)) < 0:
            return False
        at = found + len(piece)
    return text.endswith(pieces[-1]) and len(text) - len(pieces[-1]) >= at


def _bare(text: str) -> str:
    """Without white space, which templates and JSON writers put where they like."""
    return "".join(text.split())


def _apart(text: str, other: str) -> int:
    return next(
        (-at for at, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), -min(len(text), len(other))
    )


def _difference(written: str, recorded: str) -> str:
    at = -_apart(written, recorded)
    begin = max(0, at - 20)
    return (
        f"at character {at} the template writes {written[begin : at + 40]!r}, the tokens {recorded[begin : at + 40]!r}"
    )
