"""Drafts with another tokenizer: the text stays what it is, what both share and how it is spelled, every draft and
throw of the dice enumerated."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from decode import generate, load_drafter
from decode.common.errors import ConfigError, InputError
from decode.config import DecodeConfig, DrafterConfig, ModelConfig
from decode.drafters import drafting
from decode.drafters.base import Context
from decode.drafters.lm import LMDraft
from decode.drafters.lm_steps import PassByPass
from decode.drafters.untrained.cascade import CascadeDrafter
from decode.drafters.untrained.config import NgramConfig
from decode.drafters.untrained.foreign.drafter import ForeignDrafter
from decode.drafters.untrained.foreign.rows import SpelledRow
from decode.drafters.untrained.mixture import MixtureDrafter
from decode.drafters.untrained.ngram import NgramDrafter
from decode.forward.target import CachedModel
from decode.loop import Loop
from decode.models.load import load_model
from decode.requests import Request
from decode.sampling.config import SamplingConfig
from decode.sampling.warp import Sampling, warp
from decode.stage import run
from decode.trees.tree import Tree, chain_parents
from decode.trees.tree_plans import chain
from tests.decode.distributions import Distribution, blocked, distance, rejected
from tests.decode.untrained.models import (
    TEXT,
    byte_level,
    letters,
    llama,
    metaspace,
    permuted,
    reciter,
    shared,
    spelled,
)
from tests.tiers import by_default
from tests.tiny import EOS, save_tiny_target, tiny_llama
from tests.train.export.saved_heads import save_head

PAIRS = {
    "other kind of draft": lambda: (byte_level(300), metaspace()),
    "larger draft": lambda: (byte_level(300), byte_level(420)),
    "smaller draft": lambda: (byte_level(420), byte_level(258)),
    "other kind of target": lambda: (metaspace(), byte_level(300)),
}
PROMPTS = [TEXT[:6], "for é", "return x, y, z in range", "a", "# 日本", "x = größe  # “für"]


class Checked(ForeignDrafter):
    """Compares the first token of each draft with the likeliest shared one of a pass without a cache."""

    checked = 0

    def propose(self, context: Context) -> Tree:
        tree, pairs = super().propose(context), self.shared.pairs
        for row, text in enumerate(self._texts):
            if text is not None:
                logits = self.model(torch.tensor([text])).logits[0, -1]
                assert int(tree.tokens[row, 1]) == int(pairs[1][logits[pairs[0]].argmax()])
                self.checked += 1
        return tree


def drafter_of(pair: str, seed: int = 3) -> ForeignDrafter:
    """With random weights."""
    target, own = PAIRS[pair]()
    return ForeignDrafter(llama(len(own), seed), shared(target, own))


@pytest.mark.parametrize("tree", by_default(1, ["chain", "2x2x1", "dynamic"]))
@pytest.mark.parametrize("temperature", by_default(1, [0.0, 1.0]))
@pytest.mark.parametrize("pair", by_default(1, PAIRS))
def test_the_text_is_that_of_plain_decoding(pair: str, temperature: float, tree: str) -> None:
    """Ragged prompts that take over rows, halves of characters among them."""
    target, _ = PAIRS[pair]()
    prompts = [spelled(target, text)[: 3 + at * 5] for at, text in enumerate(PROMPTS)]
    size = max(map(len, prompts))
    ids = torch.tensor([[0] * (size - len(one)) + one for one in prompts])
    mask = torch.tensor([[0] * (size - len(one)) + [1] * len(one) for one in prompts])
    asked: dict[str, Any] = {"max_new_tokens": 24, "temperature": temperature, "seed": 3, "eos_token_id": (5,)}
    model, drafter = llama(len(target)), drafter_of(pair)
    plain = generate(model, None, ids, mask, batch_size=2, **asked)
    for verifier in ("coupled", "rejection", "block") if tree == "chain" else ("coupled", "rejection"):
        exact = {"num_draft_tokens": 3, "tree": tree, "verifier": verifier, "audit": True, "batch_size": 2}
        out = generate(model, drafter, ids, mask, **asked, **exact)
        assert any(one.drafted for one in out.stats.rounds)
        assert (verifier != "coupled" and temperature) or torch.equal(out.sequences, plain.sequences)


@pytest.mark.parametrize(
    ("verifier", "temperature"), [("coupled", 0.0), ("coupled", 1.0), ("rejection", 1.0), ("block", 1.0)]
)
def test_a_twin_under_other_numbers_is_accepted_whole(verifier: str, temperature: float) -> None:
    """The target's own weights, its tokens in another order: under every rule all of its drafts stand."""
    tokenizer, model = byte_level(300), llama(300)
    other, twin = permuted(tokenizer, model)
    drafter = ForeignDrafter(twin, shared(tokenizer, other))
    ids = torch.tensor([spelled(tokenizer)[:5], spelled(tokenizer)[5:10], spelled(tokenizer)[20:25]])
    asked: dict[str, Any] = {"max_new_tokens": 40, "temperature": temperature, "seed": 3, "eos_token_id": ()}
    out = generate(model, drafter, ids, num_draft_tokens=4, verifier=verifier, audit=True, batch_size=2, **asked)
    assert out.stats.tau == 5


@pytest.mark.parametrize("pair", ["smaller draft", "other kind of target"])
def test_a_twin_in_text_is_accepted(pair: str) -> None:
    """Both write the same text, characters of several bytes among it, each in its own tokens; 5 is the most."""
    target, own = PAIRS[pair]()
    script = spelled(target)
    drafter = ForeignDrafter(reciter(own), shared(target, own))
    loop = Loop(reciter(target), drafter, Request([script[:4], script[:9]], len(script) - 10, shape=chain(4)))
    texts, stats = loop.run()
    assert texts == [script[: len(text)] for text in texts]
    assert stats.tau > 3


def test_drafts_are_those_of_a_draft_without_a_cache() -> None:
    check_drafts()


def check_drafts() -> None:
    """In every round of rows that are taken over, whatever was refused before: the first token drafted is the draft's
    likeliest of all shared ones behind its own spelling of the text."""
    target, own = PAIRS["other kind of draft"]()
    drafter = Checked(llama(len(own), 3), shared(target, own))
    prompts = [spelled(target, text) for text in PROMPTS]
    request = Request(prompts, 12, Sampling(0), shape=chain(3), batch_size=2)
    Loop(llama(len(target)), drafter, request).run()
    assert drafter.checked > 60


@pytest.mark.parametrize("sizes", [[240], [100, 600]])
def test_drafts_are_right_and_passes_narrow_where_the_cache_grows(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bytes the text passes the first cache's 256 slots: in the middle of a call, and as a request takes over the
    row of one that began alike."""
    widths, runners, real = list[int](), set[CachedModel](), PassByPass.chain

    def passed(self: PassByPass, tokens: Any, place: int) -> Any:
        widths.append(tokens.shape[1])
        runners.add(self.runner)
        return real(self, tokens, place)

    monkeypatch.setattr(PassByPass, "chain", passed)
    target, own = PAIRS["smaller draft"]()
    model = tiny_llama(len(own), 32, 1, seed=3, dtype=torch.float64, max_position_embeddings=4096)
    drafter = Checked(model.requires_grad_(False), shared(target, own))
    prompts = [spelled(target, ("return range(" * 60)[:size]) for size in sizes]
    teller = tiny_llama(len(target), 32, 1, dtype=torch.float64, max_position_embeddings=4096).requires_grad_(False)
    Loop(teller, drafter, Request(prompts, 16, Sampling(0), shape=chain(3), batch_size=1)).run()
    assert len(runners) == 2
    assert drafter.checked > 10
    assert max(widths) <= 32


def test_nothing_is_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt once; then, in each round, what is new of the text, which is one or two tokens, and the drafts but for
    the last one."""
    tokenizer, model = byte_level(300), llama(300)
    other, twin = permuted(tokenizer, model)
    script, widths, prompts = spelled(tokenizer), list[int](), list[int]()
    real_chain, real_prefill = PassByPass.chain, CachedModel.prefill

    def passed(self: PassByPass, tokens: Any, place: int) -> Any:
        widths.append(tokens.shape[1])
        return real_chain(self, tokens, place)

    def prefilled(self: CachedModel, ids: Any, begin: list[int], end: list[int]) -> None:
        if self.model is twin:
            prompts.append(sum(end) - sum(begin))
        real_prefill(self, ids, begin, end)

    monkeypatch.setattr(PassByPass, "chain", passed)
    monkeypatch.setattr(CachedModel, "prefill", prefilled)
    drafter = ForeignDrafter(twin, shared(tokenizer, other))
    _, stats = Loop(model, drafter, Request([script[:60]], 40, Sampling(0), shape=chain(4))).run()
    drafted = [one for one in stats.rounds if one.drafted]
    assert prompts == [59]
    assert widths == [2, 1, 1, 1] * len(drafted)


@pytest.mark.parametrize("longest", [256, 1024])
def test_a_text_that_outgrows_the_room_for_it_is_drafted_for_as_far_as_the_draft_knows_contexts(longest: int) -> None:
    """The target's text is of few tokens, and the draft writes it in bytes."""
    target, own = PAIRS["smaller draft"]()
    text = "return range(" * 30
    model = tiny_llama(len(own), dtype=torch.float64, max_position_embeddings=longest).requires_grad_(False)
    drafter = ForeignDrafter(model, shared(target, own))
    _, stats = Loop(llama(len(target)), drafter, Request([spelled(target, text)], 8, shape=chain(3))).run()
    assert any(one.drafted for one in stats.rounds) == (longest > len(text))
    assert drafter.reader is not None
    assert (drafter.reader.runner.cache.capacity >= len(text)) == (longest > len(text))


def test_a_target_that_may_write_no_shared_token_is_drafted_for_in_vain() -> None:
    """Not a number otherwise: nothing is left of the draft's distribution."""
    target, own = PAIRS["smaller draft"]()
    between = shared(target, own)
    lonely = [token for token in range(len(target)) if token not in between.own_of][:2]
    out = generate(
        llama(len(target)), ForeignDrafter(llama(len(own)), between), torch.tensor([spelled(target)[:5]]),
        prefix_allowed_tokens_fn=lambda *_: lonely, max_new_tokens=10, verifier="rejection", seed=1, eos_token_id=(),
    )  # fmt: skip
    assert set(out.sequences[0, 5:].tolist()) <= set(lonely)


def test_it_is_a_member_and_a_helper() -> None:
    """Of a mixture with a lookup, and of a cascade whose draft it guesses."""
    target, model = byte_level(300), llama(300)
    ids = torch.tensor([spelled(target)[:7], spelled(target)[9:16]])
    asked: dict[str, Any] = {"max_new_tokens": 30, "seed": 3, "eos_token_id": ()}
    plain = generate(model, None, ids, **asked)
    for drafter in (
        MixtureDrafter([NgramDrafter(NgramConfig(1)), drafter_of("larger draft")]),
        CascadeDrafter(LMDraft(llama(300, 5)), drafter_of("larger draft")),
    ):
        out = generate(model, drafter, ids, num_draft_tokens=3, audit=True, **asked)
        assert torch.equal(out.sequences, plain.sequences)
        assert any(one.drafted for one in out.stats.rounds)


DEPTH = 2
PARENTS = chain_parents(DEPTH + 1)


TARGET, OWN = letters("abc", ["ab", "aa"]), letters("cba", ["bb", "ab", "ba", "cc"])
"""Four tokens are shared, under other numbers; "aa" is the target's alone."""
PROMPT = [0, 2, 1, 4, 1, 3]
SHARED = {0: 2, 1: 1, 2: 0, 3: 4}


class _DraftedError(Exception):
    """Ends the call."""


class Kept(ForeignDrafter):
    """Keeps its first draft and what it read for it."""

    tree: Tree
    text_read: list[int]

    def propose(self, context: Context) -> NoReturn:  # type: ignore[override]
        self.tree = super().propose(context)
        assert self._texts[0] is not None
        self.text_read = self._texts[0]
        assert all(text == self.text_read for text in self._texts)
        raise _DraftedError


def drafted(sampling: Sampling, verifier: str, rows: int) -> Kept:
    """After the draft of `rows` requests of one prompt."""
    drafter = Kept(llama(len(OWN), 3), shared(TARGET, OWN))
    request = Request([PROMPT] * rows, 8, sampling, verifier, chain(DEPTH), batch_size=rows, seed=4)
    with pytest.raises(_DraftedError):
        Loop(llama(len(TARGET)), drafter, request).run()
    return drafter


def log_law(drafter: Kept, sampling: Sampling, tokens: tuple[int, ...]) -> Tensor:
    """(V,) of the token behind these drafted ones, by a pass without a cache: the draft's over the shared tokens alone,
    warped as the target's is."""
    text = drafter.text_read + [SHARED[token] for token in tokens]
    logits = drafter.model(torch.tensor([text])).logits[0, -1]
    ours, theirs = [*SHARED.keys()], [*SHARED.values()]
    few = warp(logits[theirs][None], sampling)[0].log_softmax(-1)
    return torch.full((len(TARGET),), -torch.inf, dtype=torch.float64).index_copy(0, torch.tensor(ours), few)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("top_k", [None, 2, 5])
@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_what_is_written_has_the_targets_distribution(
    verifier: str, top_k: int | None, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 5 tokens a filter keeps all, though the draft has but 4: the fifth is of no chance."""
    sampling = Sampling(temperature) if top_k is None else Sampling(temperature, top_k=top_k)
    wanted = torch.tensor([*itertools.product(range(len(TARGET)), repeat=DEPTH)])
    forced = torch.full((len(wanted), DEPTH, len(TARGET)), -torch.inf).scatter(2, wanted[..., None], 0.0).double()
    monkeypatch.setattr(drafting, "draft_noise", lambda context: forced)
    drafter = drafted(sampling, verifier, len(wanted))
    tree = drafter.tree
    assert tree.log_q is not None
    chances = torch.zeros(len(wanted), dtype=torch.float64)
    for row, tokens in enumerate(wanted.tolist()):
        first = log_law(drafter, sampling, ()).exp()
        torch.testing.assert_close(tree.log_q[row, 0].exp(), first)
        if first[tokens[0]] > 0:
            assert int(tree.tokens[row, 1]) == tokens[0]
            second = log_law(drafter, sampling, (tokens[0],)).exp()
            torch.testing.assert_close(tree.log_q[row, 1].exp(), second)
            chances[row] = first[tokens[0]] * second[tokens[1]]
    assert torch.equal(tree.tokens[chances > 0, 1:], wanted[chances > 0])
    assert 0 < int((chances > 0).sum()) <= len(SHARED) ** DEPTH
    torch.testing.assert_close(chances.sum().item(), 1.0)
    torch.testing.assert_close(tree.log_q.logsumexp(-1), torch.zeros(tree.tokens.shape, dtype=torch.float64))
    assert distance(_written(tree, chances, sampling, verifier), _plain(sampling)) < 1e-12


def test_tokens_are_drawn_from_what_the_verifier_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the Gumbel trick, of which the noise is known: the largest of log q + noise."""
    noises: list[Tensor] = []
    real = drafting.draft_noise

    def noted(context: Context) -> Tensor | None:
        noise = real(context)
        assert noise is not None
        noises.append(noise)
        return noise

    monkeypatch.setattr(drafting, "draft_noise", noted)
    tree = drafted(Sampling(1.0, top_k=3), "rejection", 40).tree
    assert tree.log_q is not None
    assert torch.equal((tree.log_q[:, :DEPTH] + noises[0]).argmax(-1), tree.tokens[:, 1:])
    assert len(tree.tokens.unique(dim=0)) > 2


def _target_scores(tokens: Tensor, sampling: Sampling) -> Tensor:
    """(B, k + 1, V) log p at the prompt's last token and at tokens (B, k)."""
    ids = torch.cat([torch.tensor([PROMPT] * len(tokens)), tokens], 1)
    logits: Any = llama(len(TARGET))(ids).logits[:, len(PROMPT) - 1 :]
    return warp(logits.flatten(0, 1), sampling).log_softmax(-1).view(logits.shape)


def _plain(sampling: Sampling) -> Distribution:
    """Of the next k + 1 tokens."""
    found = {(): 1.0}
    for _ in range(DEPTH + 1):
        found = _longer(found, sampling)
    return found


def _longer(found: Distribution, sampling: Sampling) -> Distribution:
    more: Distribution = {}
    for tokens, mass in found.items():
        law = _target_scores(torch.tensor([tokens], dtype=torch.long), sampling)[0, -1].exp()
        more |= {(*tokens, token): mass * chance for token, chance in enumerate(law.tolist()) if chance}
    return more


def _written(tree: Tree, chances: Tensor, sampling: Sampling, verifier: str) -> Distribution:
    """Of k + 1 tokens: what a round emits, and the target's own behind that."""
    assert tree.log_q is not None
    keep = chances > 0
    seen = Tree(tree.tokens[keep], PARENTS, "iid", tree.log_q[keep])
    scores = _target_scores(seen.tokens[:, 1:], sampling)
    mass = chances[keep]
    told = rejected(seen, PARENTS, scores, mass) if verifier == "rejection" else blocked(seen, scores, mass)
    found: Distribution = {}
    for length in range(1, DEPTH + 2):
        found = _longer(found, sampling) if found else {}
        for tokens, more in told.items():
            if len(tokens) == length:
                found[tokens] = found.get(tokens, 0.0) + more
    return found


def test_what_stands_for_the_same_bytes_is_shared() -> None:
    check_shared()


def check_shared() -> None:
    """A space is Ġ here and ▁ there, and a byte a letter here and <0x..> there."""
    between = shared(byte_level(300), metaspace())
    ours, theirs = between.own.tokenizer.get_vocab(), between.target.tokenizer.get_vocab()
    assert between.own_of[theirs["Ġ"]] == ours["▁"]
    assert between.own_of[theirs["re"]] == ours["re"]
    assert between.own_of[theirs["Ã"]] == ours["<0xC3>"]
    assert between.own_of[theirs["e"]] == ours["e"], "not the fallback for its byte"
    assert between.own_of[theirs[EOS]] == ours[EOS]
    assert not between.are_all
    other, _ = permuted(byte_level(300), llama(300))
    assert shared(byte_level(300), other).are_all


@pytest.mark.parametrize("kinds", ["byte-level, metaspace", "metaspace, byte-level", "byte-level, bytes"])
def test_text_is_spelled_bit_by_bit_as_at_once(kinds: str) -> None:
    check_spelled(kinds)


def check_spelled(kinds: str = "byte-level, bytes") -> None:
    """Wherever the target's text ends, within a character too, the draft reads what its tokenizer makes of the whole
    text, but where the text ends within what is one token of the draft; no half of a character is among it."""
    known = {"byte-level": byte_level(300), "metaspace": metaspace(), "bytes": byte_level(258)}
    target, own = (known[kind] for kind in kinds.split(", "))
    between, script = shared(target, own), spelled(target)
    whole, exact = between.own.ids(TEXT), 0
    for length in range(4, len(script)):
        row = SpelledRow(between)
        for token in script[:length]:
            row.extend([token])
        text = between.own.text(row.whole)
        assert TEXT.startswith(text)
        exact += whole[: len(row.whole)] == row.whole
    assert exact > 9


def test_special_tokens_keep_their_meaning() -> None:
    """The draft reads none of the letters of their names."""
    target, own = byte_level(300), metaspace()
    row = SpelledRow(shared(target, own))
    row.extend([0, *spelled(target, "in x"), 0, 1, *spelled(target, "for")])
    assert row.whole == [0, *spelled(own, "in x"), 0, 1, *spelled(own, "for")]


def other_words(folder: Path) -> None:
    """A tokenizer that has no word in common with any other."""
    vocab = {f"{number}th-word": number for number in range(299)} | {"<unk>": 299}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)


def without_a_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def a_head(folder: Path) -> None:
    shutil.rmtree(folder)
    save_head(folder, folder.parent / "target", "medusa")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (other_words, "share 0, under 5% of the smaller vocabulary.*another draft"),
        (without_a_tokenizer, "draft holds no tokenizer files"),
        (a_head, r"head \(medusa\), which drafts from the hidden states"),
        (shutil.rmtree, "does not exist"),
    ],
)
def test_drafts_that_cannot_be_translated_are_refused_before_the_target_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Any, message: str
) -> None:
    target, draft = (str(save_tiny_target(tmp_path / name)) for name in ("target", "draft"))
    damage(Path(draft))
    monkeypatch.setattr("decode.stage.load_model", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(InputError, match=message):
        run(DecodeConfig(ModelConfig(target), DrafterConfig(path="foreign", settings={"draft": draft}), prompt="a"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "draft=null"),
        ({"draft": "ngram"}, "draft=ngram is the name of a drafter"),
        ({"draft": "x", "by": "text"}, "unknown key 'draft.settings.by'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DrafterConfig(path="foreign", settings=settings)


@pytest.mark.slow
def test_it_is_loaded_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From Python, from the command line, and as a member; a draft of other tokens, given as it is, is told of it."""
    target = str(save_tiny_target(tmp_path / "target"))
    draft = str(save_tiny_target(tmp_path / "draft", vocab_size=420, num_layers=1, seed=2))
    model = load_model(ModelConfig(target))
    drafter = load_drafter("foreign", target=model, draft=draft)
    assert type(drafter) is ForeignDrafter
    settings: dict[str, Any] = {"draft": draft}
    mixed = DrafterConfig(path="mixture", settings={"members": ["ngram", "foreign"], "settings": {"foreign": settings}})
    sampling = SamplingConfig(max_new_tokens=8)
    for config in (DrafterConfig(path="foreign", settings=settings), mixed):
        run(DecodeConfig(ModelConfig(target), config, sampling, prompt="return x", color="never"))
        assert "tokens per pass" in capsys.readouterr().out
    with pytest.raises(
        InputError, match=f"decode with it: python -m decode .*draft=foreign draft.settings.draft={draft}"
    ):
        load_drafter(draft, target=model)


def test_other_tokens_are_told_of_the_way_round_it(tmp_path: Path) -> None:
    """Vocabularies of one size too."""
    target, draft = (save_tiny_target(tmp_path / name) for name in ("target", "draft"))
    written = json.loads((draft / "tokenizer.json").read_text())
    vocab = written["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (draft / "tokenizer.json").write_text(json.dumps(written))
    with pytest.raises(InputError, match="tokenizers differ.*decode with it: python -m decode .*draft=foreign"):
        load_drafter(draft, target=load_model(ModelConfig(str(target))))
