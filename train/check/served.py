"""A folder's tensors read back for a replica, and their logits against those of the head that was exported."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from decode.common.checked_json import read_json
from decode.drafters.base import Batch, Step
from decode.drafters.head_draft import HeadDraft
from decode.formats.lm import as_sliding
from decode.formats.mask import MASK_FILE, mask_vector
from decode.formats.rope import older_rope
from decode.formats.source import Source
from decode.formats.states import listed
from decode.formats.vocabulary import drafted_ids
from train.check.blocks import mask_token
from train.check.replicas import REPLICAS
from train.check.replicas.base import Served
from train.check.subject import Finding, Subject
from train.export.engines.base import NameRules

TOKENS = 24
ENDS = ("embed_tokens.", "lm_head")
REPLICATED = NameRules(
    (
        (r"^(model\.)?(midlayer|layers\.0)\.", "layers.0."),
        (r"^(medusa_heads\.|heads\.)?(\d+)\.(\d+)\.linear\.", r"blocks.\2.layers.\3."),
        (r"^(\d+)\.\d+\.weight$", r"lm_heads.\1.weight"),
    )
)
"""The names that replicas know."""
MOST_DIFFERENCE = 1e-5
"""Of logits, by the largest of them: float32 sums in another order."""


def served(subject: Subject) -> Served:
    """What the first engine reads, in float32."""
    folder = subject.folder
    weights = {REPLICATED.renamed(own): folder.tensor(own) for own in subject.renamed(subject.engines[0]).values()}
    dtype = next(one.dtype for one in weights.values() if one.is_floating_point())
    weights = {name: one.float() for name, one in weights.items() if one.is_floating_point()}
    embedding, head = (rows.to(dtype).float() for rows in (subject.embedding, subject.output_rows))
    rows = weights.get("embed_tokens.weight", embedding)
    return Served(folder.fields, weights, embedding, head, drafted_ids(subject.folder), _mask(subject, rows))


def _mask(subject: Subject, rows: Tensor) -> Tensor:
    token = mask_token(subject)
    if (subject.folder.path / MASK_FILE).is_file():
        return mask_vector(subject.folder, subject.folder.tensor).float()
    return rows[:1] if token is None else rows[token : token + 1]


def same_states(subject: Subject, source: Source) -> list[Finding]:
    """config.json lists the hidden states that the head was trained on."""
    trained = tuple(sorted(source.config.taps))
    return [
        Finding(
            f"{name} means the hidden states {list(ids)}, and the head was trained on {list(trained)}",
            "the engine hands over those of other layers, without a word",
            "Export the draft anew",
            check="states",
        )
        for name, ids in listed(subject.folder.fields).items()
        if ids != trained
    ]


def same_files(subject: Subject, source: Source) -> list[Finding]:
    """A draft model's configuration is the one that was trained, but for its precision."""
    ours = read_json(source.folder / "config.json")
    ours |= older_rope(ours)
    if source.window is not None:  # written as a Mistral's, which is the form that is heeded
        ours = as_sliding(ours, source.window)
    precision = ("dtype", "torch_dtype")
    wrong = sorted(
        name
        for name in {*ours, *subject.folder.written} - {*precision}
        if ours.get(name) != subject.folder.written.get(name)
    )
    if not wrong:
        return []
    what = f"config.json has other values than {source.folder} for {', '.join(wrong)}"
    return [Finding(what, "the engine runs another model than was trained", "Export the draft anew", check="keys")]


@torch.no_grad()
def same_logits(subject: Subject, source: Source) -> list[Finding]:
    """The logits of one batch, by a replica on what was written and by the head itself: random tokens and random
    hidden states between the target's real ends."""
    head, depth = source.head, source.config.depth
    batch = _batch(head)
    ours, places = _of_head(head, batch)
    taps = source.config.taps
    in_order = sorted(range(len(taps)), key=lambda place: taps[place])  # as engines hand them over
    assert batch.features is not None
    features = batch.features[0, :, in_order]
    read = _with_exact_ends(served(subject), subject, source.has_own_head)
    theirs = REPLICAS[subject.form](read, batch.ids[0], features, places, depth)
    faults = []
    for step, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        inside = one.isfinite()
        scale = one[inside].abs().max().clamp(min=1.0)
        difference = float(((one - other)[inside].abs().max() / scale).nan_to_num(torch.inf))
        # of a slot's candidates the last one may be another where two logits are nearly the same
        others, spare = (
            int((inside != other.isfinite()).sum()),
            len(one) if subject.form in ("dflash2", "lilicorr") else 0,
        )
        if others > spare or difference > MOST_DIFFERENCE:
            faults.append(f"step {step} by {difference:.2g}")
    if not faults:
        return []
    what = f"logits of the folder read back differ from the head's own, by their largest: {', '.join(faults)}"
    effect = "an engine would draft other tokens than draftsmith does"
    return [Finding(what, effect, "Export the draft anew", check="logits")]


def _with_exact_ends(read: Served, subject: Subject, has_own_head: bool) -> Served:
    """Between the target's own ends, as the head is: those of a folder in bfloat16 are rounded, to what another check
    compares exactly."""
    ends = ENDS[:1] if has_own_head else ENDS
    weights = {name: one for name, one in read.weights.items() if not name.startswith(ends)}
    rows, token = subject.output_rows, mask_token(subject)
    is_row = token is not None and token < len(subject.embedding) and not (subject.folder.path / MASK_FILE).is_file()
    mask = subject.embedding[token : token + 1] if is_row and token is not None else read.mask
    head = rows if read.drafted is None else rows[read.drafted]
    return replace(read, weights=weights, embedding=subject.embedding, head=head, mask=mask)


def _batch(head: HeadDraft) -> Batch:
    generator = torch.Generator().manual_seed(0)
    config = head.config
    # a dynamic rope turns what lies beyond its context by the length of the pass, which is another one here
    tokens = max(config.depth + 2, min(TOKENS, config.max_positions - config.depth))
    shape = (1, tokens, len(config.taps), config.hidden_size)
    return Batch(
        ids=torch.randint(config.vocab_size, (1, tokens), generator=generator),
        positions=torch.arange(tokens)[None],
        document=torch.zeros(1, tokens, dtype=torch.long),
        loss_mask=torch.ones(1, tokens, dtype=torch.bool),
        features=torch.randn(shape, generator=generator),
    )


def _of_head(head: HeadDraft, batch: Batch) -> tuple[list[Tensor], Tensor]:
    """(logits (N, V) of each step, the places (N,) of the last committed token): those at which every step drafts; a
    block is laid behind every token, however few were trained."""
    if hasattr(head.config, "anchors"):
        head.config = replace(head.config, anchors=TOKENS)  # type: ignore[call-arg]
    steps = list(head.unroll(batch))
    found = [_places(step, number) for number, step in enumerate(steps)]
    places = sorted(set.intersection(*map(set, found)) - {-1, 0})
    assert places
    logits = [
        head.widened(step.drafted(step.hidden[0, [at.index(place) for place in places]])).float()
        for step, at in zip(steps, found, strict=True)
    ]
    return logits, torch.tensor(places)


def _places(step: Step, number: int) -> list[int]:
    """Of each slot, the place of the last committed token; -1 for slots that do not count. Step s drafts behind s
    tokens."""
    rows, valid = step.target_rows[0] - number, step.valid[0]
    return torch.where(valid, rows, -1).tolist()
