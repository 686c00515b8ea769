"""What a user sets about the draft to train; imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from decode.common.errors import ConfigError
from decode.common.typed_config import require, require_at_least
from decode.config import model_folder
from train.drafts.pruning.pruning_config import PruningConfig

LM_WIDTH = 256
"""Of a model that is trained without a target."""
HEAD_DIM = 64
SINKS = 4
MOST_CANDIDATES = 4096
WINDOWED = ("lm", "eagle3")
"""Families that can attend over a window."""


@dataclass
class AdapterConfig:
    """Low-rank adapters (peft LoRA) in a saved draft, trained instead of its weights."""

    rank: int = 0
    """Rank of the adapters; 0 trains the whole draft."""
    alpha: float = 32.0
    """Scale of the adapters' contribution (peft's lora_alpha)."""
    targets: list[str] = field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    """Names of the linear layers that get one."""

    def __post_init__(self) -> None:
        require_at_least(0, self, "", "rank")
        require(self.rank == 0 or bool(self.targets), "targets is empty, so adapters would be put nowhere; name layers")


@dataclass
class ParallelConfig:
    """A draft model that drafts several tokens in one pass (PARD)."""

    tokens: int = 0
    """Tokens of a pass; 0 drafts them one by one."""
    mask_token: int | None = None
    """Id of the token that stands where tokens are to be drafted; None is a row that no token has, else the one that
    begins texts."""
    anchors: int | None = None
    """Places of a row behind which masks are trained; None is one for every 4 tokens of it."""

    def __post_init__(self) -> None:
        require_at_least(0, self, "parallel.", "tokens", "mask_token")
        require_at_least(1, self, "parallel.", "anchors")
        require(
            self.tokens != 1,
            "parallel.tokens=1 is a pass for each token, which is what parallel.tokens=0 does. Use 2 or more, or 0",
        )
        require(
            self.tokens > 0 or (self.mask_token, self.anchors) == (None, None),
            f"parallel.tokens=0 puts no masks, where parallel.mask_token={self.mask_token} and parallel.anchors="
            f"{self.anchors} say how. Set parallel.tokens, or leave them out",
        )


Family = Literal["lm", "medusa", "hydra", "eagle3", "mtp", "peagle", "dspark", "dflash2", "lilicorr", "exit_adapter"]
OF_A_ROUND = tuple(name for name in get_args(Family) if name not in ("lm", "exit_adapter"))
"""Heads with passes of their own."""
OWNERS = {
    "depth": OF_A_ROUND,
    "vocab": (*OF_A_ROUND, "lm"),
    "mlp_layers": ("medusa", "hydra"),
    "prefix_attention": ("hydra",),
    "markov_rank": ("dspark", "dflash2"),
    "candidates": ("dflash2", "lilicorr"),
    "confidence": ("dspark",),
    "anchors": ("dspark", "dflash2", "lilicorr"),
    "layout": ("dspark",),
    "causal": ("dspark", "dflash2", "lilicorr"),
    "mask_token": ("dspark", "dflash2", "lilicorr", "peagle"),
    "init_own": ("mtp",),
    "fc_norm": ("eagle3", "peagle"),
    "norm_before_fc": ("eagle3", "peagle"),
    "norm_output": ("eagle3",),
}
"""Settings of a head that some families alone heed."""


@dataclass
class HeadSettings:
    """What heads have over a draft model: they read the target's hidden states (every family but lm)."""

    depth: int = 4
    """Draft tokens of a round: Medusa's and Hydra's heads, the steps of EAGLE-3 and MTP, what a pass of P-EAGLE or
    a block of DSpark, in either layout, drafts."""
    taps: list[int] | None = None
    """Hidden states that are read: 0 the embeddings, i the output of layer i - 1, -1 the final one; None is the
    family's own choice."""
    vocab: int | None = None
    """Entries of a reduced draft vocabulary, of lm as well: the most frequent tokens of the training data; None drafts
    every token."""
    mlp_layers: int = 1
    """medusa, hydra: residual layers of each head."""
    prefix_attention: bool = False
    """hydra: a layer of attention over the prefix before the heads (Hydra++)."""
    markov_rank: int = 128
    """dspark: rank of the bias that the token before gives; 0 is DFlash, whose tokens do not know each other. dflash2:
    rank of its selector."""
    candidates: int = 16
    """dflash2, lilicorr: the tokens of each slot that are chosen from."""
    confidence: bool = True
    """dspark: predict each token's chance of acceptance."""
    anchors: int | None = None
    """dspark, dflash2, lilicorr: blocks trained per row of a batch; None is one for every 8 of its tokens, as 512 of
    4,096."""
    layout: Literal["anchor", "fill_in"] | None = None
    """dspark: anchor is a block of `depth` slots of which each drafts the token behind it, as engines run DSpark;
    fill_in one of depth + 1 whose masks stand where their tokens will, as engines run DFlash. None is fill_in for
    markov_rank=0, else anchor."""
    causal: bool = False
    """dspark, dflash2, lilicorr: a slot sees those before it in its block alone (JetSpec), not those behind it."""
    mask_token: int | None = None
    """dspark, dflash2, lilicorr, peagle: id of a token whose row of the target's embedding, which stays so, is the
    mask, for engines that take no other; None is a vector that is learned, of peagle a row that no token has or the
    token that begins texts, where that is not all zeros."""
    init_own: bool = False
    """mtp: start from the prediction layers that the target's own checkpoint holds."""
    fc_norm: bool | None = None
    """eagle3, peagle: normalise each of the target's hidden states before they are put together (EAGLE-3.1); None is
    true unless norm_before_fc."""
    norm_before_fc: bool = False
    """eagle3, peagle: normalise them together, as one vector, instead."""
    norm_output: bool | None = None
    """eagle3: feed back what the output head reads, the state behind the last norm (EAGLE-3.1); None is true."""

    def __post_init__(self) -> None:
        require_at_least(1, self, "head.", "depth", "mlp_layers", "anchors", "vocab", "candidates")
        require_at_least(0, self, "head.", "markov_rank", "mask_token")
        taps = self.taps
        require(
            self.candidates <= MOST_CANDIDATES, f"head.candidates={self.candidates}; use {MOST_CANDIDATES} or fewer"
        )
        require(
            taps is None or 0 < len(taps) == len(set(taps)),
            f"head.taps={taps} must name different hidden states, or be null for the family's own choice",
        )


@dataclass
class DraftConfig:
    """The draft to train (group `draft`); the shape fields count only where `init_from` is not given."""

    family: Family = "lm"
    """Draft family; the file of that name in decode/drafters/. All but lm are heads on the target's hidden states."""
    init_from: str | None = None
    """Model (folder or hub id) or saved head (folder) to start from, the folder of the run that trained it, or that of
    a head as others publish them; None starts from random weights."""
    revision: str | None = None
    """Hub revision of `init_from`."""
    layers: int = 1
    """Transformer layers of lm, dspark, dflash2, lilicorr and peagle."""
    width: int | None = None
    """Hidden size d of lm, None is half of its target's, or 256 without one; a head is as wide as its target."""
    heads: int | None = None
    """Attention heads; None is one for every 64 channels of `width`, for a head as many as its target has."""
    kv_heads: int | None = None
    """Key/value heads (grouped-query attention); None is as many as `heads`, for a head as many as its target has."""
    mlp_width: int | None = None
    """Width of the gated MLP; None is 8/3 of `width`, rounded up to a multiple of 64, for a head its target's. Of
    exit_adapter's plain MLP; None is the target's hidden size."""
    tie_embeddings: bool = True
    """lm: use the token embedding as output head too."""
    max_positions: int | None = None
    """Longest context in tokens; None is the target's, or `sequence_length` where there is no target."""
    window: int | None = None
    """lm, eagle3: the last positions that the draft attends to, its own among them, in training and in decoding alike;
    None is all (of `init_from`: what that has)."""
    sinks: int = SINKS
    """The first positions, which it sees besides its `window`."""
    lora: AdapterConfig = field(default_factory=AdapterConfig)
    """Low-rank adapters of `init_from`; off by default."""
    pruning: PruningConfig = field(default_factory=PruningConfig)
    """Parts of lm's `init_from` that are left out before training; nothing by default."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Several tokens of lm in one pass; off by default."""
    head: HeadSettings = field(default_factory=HeadSettings)
    """What heads have, every family but lm."""

    @property
    def head_shape(self) -> dict[str, Any]:
        """The settings of a head's shape by their names in its configuration."""
        return vars(self.head) | {name: getattr(self, name) for name in ("layers", "heads", "kv_heads", "mlp_width")}

    def __post_init__(self) -> None:
        self.init_from = None if self.init_from is None else model_folder(self.init_from)
        require_at_least(1, self, "", "layers", "width", "heads", "kv_heads", "mlp_width", "max_positions")
        self._check_adapters()
        self._check_window()
        self._check_pruning()
        if self.is_head:
            self._check_head()
        else:
            self._check_lm()

    @property
    def is_head(self) -> bool:
        """Whether it drafts from the target's hidden states."""
        return self.family != "lm"

    def lm_sizes(self, target_width: int | None) -> tuple[int, int]:
        """(width, heads) of lm, for a target of that width; ConfigError where no number of heads fits what is set."""
        width = self.width
        if width is None:
            wanted = LM_WIDTH if target_width is None else target_width // 2
            unit = 2 * self.heads if self.heads else HEAD_DIM if wanted >= HEAD_DIM else 2
            width = max(unit, wanted // unit * unit)
        most = self.heads or max(1, width // HEAD_DIM, self.kv_heads or 1)
        for heads in range(most, 0, -1):
            if width % (2 * heads) == 0 and heads % (self.kv_heads or heads) == 0:
                return width, heads
        raise ConfigError(
            f"draft.width={width} and draft.kv_heads={self.kv_heads} go with no number of even heads up to {most}; set "
            "draft.heads, a multiple of kv_heads whose double divides the width"
        )

    def _check_adapters(self) -> None:
        if self.lora.rank == 0:
            return
        require(
            self.init_from is not None,
            f"lora.rank={self.lora.rank} adapts a pretrained draft, but init_from is null: the frozen rest would stay "
            "random. Set draft.init_from, or draft.lora.rank=0",
        )
        new = {"parallel.tokens": self.parallel.tokens, "window": self.window}
        new |= {} if self.is_head else {"head.vocab": self.head.vocab}
        asked = [f"draft.{name}={value}" for name, value in new.items() if value]
        require(
            not asked,
            f"lora.rank={self.lora.rank} with {', '.join(asked)}: an adapter lies in a draft as it was saved, and "
            "holds no such setting. Leave that out (draft=lm for one of draft=pard), or train the draft whole",
        )

    def _check_window(self) -> None:
        require_at_least(1, self, "", "window")
        require_at_least(0, self, "", "sinks")
        if self.window is None:
            require(
                self.sinks == SINKS,
                f"sinks={self.sinks} are seen besides the last draft.window positions, and draft.window is null, so "
                "that all are. Set draft.window, or leave draft.sinks out",
            )
            return
        why = "has no attention to narrow" if self.family in ("medusa", "exit_adapter") else "attends to the whole text"
        require(
            self.family in WINDOWED,
            f"window={self.window} is for draft={' and '.join(WINDOWED)}, and draft.family={self.family} {why}. Leave "
            "draft.window out, or use one of those families",
        )
        check_window(self.window, self.max_positions or self.window, "draft.max_positions")

    def _check_lm(self) -> None:
        width, heads, kv = self.width, self.heads, self.kv_heads
        if width and heads:
            require(width % (2 * heads) == 0, f"width={width} does not divide into {heads} even heads")
        if heads and kv:
            require(heads % kv == 0, f"heads={heads} is not a multiple of kv_heads={kv}")

    def _check_pruning(self) -> None:
        if not self.pruning.is_asked:
            return
        require(
            not self.is_head,
            f"{self.pruning} is for family lm, and draft.family={self.family} is a head, built as small as you set it. "
            "Leave draft.pruning out, or use draft=lm with draft.init_from",
        )
        require(
            self.init_from is not None,
            f"{self.pruning} leaves out parts of a saved model, and init_from is null. Set draft.init_from, the "
            "target's own folder for example, or give the sizes themselves (draft.layers and so on)",
        )
        require(
            self.lora.rank == 0,
            f"lora.rank={self.lora.rank} with {self.pruning}: merged adapters would fill zeros again, and adapters of "
            "what is left fit no saved model. Set draft.lora.rank=0, or leave draft.pruning out",
        )

    def _check_head(self) -> None:
        require(
            self.width is None,
            f"width={self.width}, but draft.family={self.family} reads and makes hidden states of its target, and is "
            "as wide as that. Leave draft.width out",
        )
        require(
            self.parallel.tokens == 0,
            f"parallel.tokens={self.parallel.tokens} is for family lm, and draft.family={self.family}; of heads "
            "peagle, dspark, dflash2 and lilicorr draft in one pass. Leave draft.parallel out, or use one of those",
        )
        default = HeadSettings()
        for name, owners in OWNERS.items():
            value = getattr(self.head, name)
            require(
                value == getattr(default, name) or self.family in owners,
                f"head.{name}={value} is for draft={' and '.join(owners)}, and draft.family={self.family} would "
                "ignore it. Leave it out",
            )
        taps = self.head.taps
        require(
            self.family != "exit_adapter"
            or self.init_from is not None
            or (taps is not None and taps[0] >= 1 == len(taps)),
            f"head.taps={taps}, and exit_adapter leaves behind one of the target's layers, counted from 1; give "
            "draft.head.taps=[2], say, and measure others beside it with mode=drafters",
        )
        require(
            self.layers == 1 or self.family in ("dspark", "dflash2", "lilicorr", "peagle"),
            f"layers={self.layers}, and draft.family={self.family} is of one layer; leave draft.layers out",
        )
        require(
            not self.head.init_own or self.init_from is None,
            f"head.init_own=true starts from the target's own layers, and init_from={self.init_from} from a saved "
            "head; set one of them",
        )


def check_window(window: int, positions: int, where: str) -> None:
    """Raise ConfigError where no token of a draft that knows so many positions would be out of its window."""
    require(
        window <= positions,
        f"draft.window={window} is longer than {where}={positions}, so that no token would ever be out of it. Use a "
        "shorter window, or leave draft.window out",
    )
