"""What one forward pass computes: the trie, its cuts, its buckets; against attention computed the obvious way."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from astuner.contracts.errors import ConfigError
from astuner_local.trainer.layout import MicroBatch, PackedAttention, Row, _cut, bucket, plan
from astuner_local.trainer.logprobs import token_logprobs

# few symbols, so that prefixes are shared, one sequence begins another, and some are equal
sequences_of = st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=12), min_size=1, max_size=8)


def laid_out(sequences: list[list[int]], data: st.DataObject, **options: object) -> tuple[list, list, list[MicroBatch]]:
    ids = [np.array(s) for s in sequences]
    trained = [
        np.array(sorted(data.draw(st.sets(st.integers(1, len(s) - 1), min_size=1, max_size=4)))) for s in sequences
    ]
    return ids, trained, plan(ids, trained, hidden_size=8, **options)  # type: ignore[arg-type]


@given(sequences_of, st.data(), st.sampled_from(["always", "never", "auto"]), st.sampled_from([None, 6, 20]))
def test_every_trained_token_is_predicted_from_exactly_what_precedes_it(
    sequences: list[list[int]], data: st.DataObject, sharing: str, budget: int | None
) -> None:
    ids, trained, micros = laid_out(sequences, data, sharing=sharing, budget=budget)
    assert sorted(i for m in micros for i in m.samples) == list(range(len(ids)))
    for micro in micros:
        assert len(micro.samples) == 1 or budget is None or len(micro.input_ids) <= budget
        seen = contexts(micro)
        at = 0
        for place, member in enumerate(micro.samples):
            for position in trained[member]:
                assert micro.owner[at] == place
                assert micro.target[at] == ids[member][position]
                assert seen[int(micro.source[at])] == ids[member][:position].tolist()
                at += 1
        assert at == len(micro.target)


def contexts(micro: MicroBatch) -> list[list[int]]:
    """The tokens that each flat token attends to, in order, found by probing the attention function.

    Values are one-hot in the token's flat index and all keys are equal, so the output is the uniform mean over what
    is visible.
    """
    tokens = len(micro.input_ids)
    zeros = torch.zeros(tokens, 1, tokens)
    visible = micro.attention(zeros, zeros, torch.eye(tokens)[:, None]) > 0
    found = []
    for row in visible:
        flat = row.nonzero()[:, 0]
        order = micro.position_ids[flat].argsort()
        assert micro.position_ids[flat][order].tolist() == list(range(len(flat)))
        found.append(micro.input_ids[flat][order].tolist())
    return found


@given(sequences_of, st.data())
def test_always_sharing_computes_each_distinct_prefix_once(sequences: list[list[int]], data: st.DataObject) -> None:
    ids, trained, (micro,) = laid_out(sequences, data, sharing="always")
    used = [tuple(s[: t[-1]].tolist()) for s, t in zip(ids, trained, strict=True)]
    distinct = {s[: n + 1] for s in used for n in range(len(s))}
    assert len(micro.input_ids) == len(distinct)
    assert micro.raw_tokens == sum(map(len, used))
    alone = plan(ids, trained, hidden_size=8, sharing="never")[0]
    assert len(alone.input_ids) == micro.raw_tokens


def test_auto_shares_long_prefixes_and_not_short_ones() -> None:
    ends = [np.full(300, i) for i in (1, 2)]

    def computed(common: int) -> int:
        ids = [np.concatenate([np.zeros(common, dtype=np.int64), end]) for end in ends]
        (micro,) = plan(ids, [np.array([len(s) - 1]) for s in ids], hidden_size=64)
        return micro.raw_tokens - len(micro.input_ids)

    assert computed(2) == 0  # the mask would cost more than two tokens
    assert computed(400) == 400


def test_nothing_after_the_last_trained_token_is_computed() -> None:
    (micro,) = plan([np.arange(50)], [np.array([3, 7])], hidden_size=8)
    assert micro.input_ids.tolist() == list(range(7))
    assert micro.target.tolist() == [3, 7]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=9), st.integers(1, 25))
def test_cuts_are_the_cheapest_that_fit(rows: list[tuple[int, int]], budget: int) -> None:
    lengths = [n for n, _ in rows]
    shared = [0] + [min(s, a, b) for (_, s), a, b in zip(rows[1:], lengths, lengths[1:], strict=False)]

    def unique(begin: int, end: int) -> int:
        return lengths[begin] + sum(lengths[k] - shared[k] for k in range(begin + 1, end))

    def fits(cuts: list[tuple[int, int]]) -> bool:
        return all(e - b == 1 or unique(b, e) <= budget for b, e in cuts)

    def all_cuts(start: int) -> list[list[tuple[int, int]]]:
        if start == len(rows):
            return [[]]
        return [[(start, e), *rest] for e in range(start + 1, len(rows) + 1) for rest in all_cuts(e)]

    def cost(cuts: list[tuple[int, int]]) -> tuple[int, int]:
        return sum(unique(b, e) for b, e in cuts), len(cuts)

    found = _cut(lengths, shared, budget)
    assert fits(found)
    assert cost(found) == min(cost(c) for c in all_cuts(0) if fits(c))


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=12), st.integers(0, 10**6))
def test_packed_attention_is_attention(sizes: list[tuple[int, int]], seed: int) -> None:
    """Rows of any sizes, grouped heads: equal to softmax attention written out row by row."""
    rng = np.random.default_rng(seed)
    rows, tokens = [], 0
    for new, old in sizes:
        prefix = rng.integers(0, tokens, size=old) if tokens else np.zeros(0, dtype=np.int64)
        rows.append(Row(first=tokens, queries=new, path=np.concatenate([prefix, np.arange(tokens, tokens + new)])))
        tokens += new
    torch.manual_seed(seed)
    q, k, v = torch.randn(tokens, 4, 8), torch.randn(tokens, 2, 8), torch.randn(tokens, 2, 8)
    found = PackedAttention(rows, tokens, torch.device("cpu"))(q, k, v)
    for row in rows:
        path = torch.from_numpy(row.path)
        for n in range(row.queries):
            visible = path[: len(path) - row.queries + n + 1]
            for head in range(4):
                scores = k[visible, head // 2] @ q[row.first + n, head] / 8**0.5
                expected = torch.softmax(scores, 0) @ v[visible, head // 2]
                assert torch.allclose(found[row.first + n, head * 8 : head * 8 + 8], expected, atol=1e-5)


def test_one_long_row_does_not_pad_the_others() -> None:
    rows = [Row(first=0, queries=2000, path=np.arange(2000))]
    rows += [Row(first=2000 + 20 * i, queries=20, path=np.arange(2000 + 20 * i, 2020 + 20 * i)) for i in range(50)]
    groups = bucket(rows)
    assert sorted(len(g) for g in groups) == [1, 50]


def test_rows_must_cover_every_token() -> None:
    with pytest.raises(ValueError, match="cover"):
        PackedAttention([Row(first=0, queries=2, path=np.arange(2))], 3, torch.device("cpu"))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunked_logprobs_equal_dense_ones_with_gradients(bias: bool, temperature: float) -> None:
    torch.manual_seed(0)
    head = nn.Linear(6, 11, bias=bias)
    hidden, targets = torch.randn(10, 6), torch.randint(0, 11, (10,))
    weights = torch.randn(2, 10)
    results = []
    for chunk in (None, 4):
        leaf = hidden.clone().requires_grad_()
        head.zero_grad()
        logprobs, entropy = token_logprobs(
            leaf, head, targets, temperature=temperature, with_entropy=True, entropy_grad=True, chunk=chunk
        )
        (weights[0] @ logprobs + weights[1] @ entropy).backward()
        results.append([logprobs, entropy, leaf.grad, head.weight.grad, *([head.bias.grad] if bias else [])])
    for dense, chunked in zip(*results, strict=True):
        assert torch.allclose(dense, chunked, atol=1e-6)


def test_large_heads_run_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Adapted(nn.Linear):
        pass

    monkeypatch.setattr("astuner_local.trainer.logprobs.DENSE_LIMIT", 100)
    with pytest.raises(ConfigError, match="target_modules"):  # only the chunked way refuses it
        token_logprobs(torch.randn(4, 6), Adapted(6, 11), torch.zeros(4, dtype=torch.long), temperature=1.0)
