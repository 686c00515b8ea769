"""Settings of drafters that are named, not loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from decode.common.typed_config import build, require
from decode.trees import MOST_NODES

LONGEST_MATCH = 16
"""Tokens of a text that are looked up in a datastore."""


@dataclass
class NgramConfig:
    """`ngram`: prompt lookup."""

    least_match: int = 2
    """Fewest tokens at the end of the text that must occur earlier for anything to be drafted."""
    memory: int = 0
    """Tokens of ended requests of this process that are searched besides (up to twice as many); 0 searches none."""

    def __post_init__(self) -> None:
        require(self.least_match >= 1, f"least_match={self.least_match}; a match has at least 1 token")
        require(self.memory >= 0, f"memory={self.memory} is negative; 0 searches no earlier requests")


@dataclass
class EditConfig:
    """`edit`: the text that is being edited."""

    source: str | None = None
    """Text file that is edited, the same for all requests; null: each request's own prompt."""


@dataclass
class RetrievalConfig:
    """`retrieval`: a corpus, or documents."""

    datastore: str | None = None
    """Folder that python -m distill.datastore wrote."""
    documents: str | None = None
    """Text file, or folder of text files, that is searched besides: what a request was given to answer from."""
    least_match: int = 2
    """Fewest tokens at the end of the text that must occur there for anything to be drafted."""

    def __post_init__(self) -> None:
        require(
            1 <= self.least_match <= LONGEST_MATCH,
            f"least_match={self.least_match}; matches in a datastore have 1 to {LONGEST_MATCH} tokens",
        )
        require(
            self.datastore is not None or self.documents is not None,
            "retrieval drafts from datastore=FOLDER, documents=FILE_OR_FOLDER, or both, and neither is given",
        )


@dataclass
class JacobiConfig:
    """`jacobi`: guesses at later places, refined by the target's own passes."""

    window: int = 8
    """Places behind the text that are guessed at once."""
    ngram: int = 3
    """Tokens of an n-gram; each place has ngram - 1 tokens in every pass. 2 is Jacobi decoding."""
    pool: int = 8
    """N-grams that are kept of each first token, the last ones."""

    def __post_init__(self) -> None:
        require(self.window >= 1, f"window={self.window}; at least 1 place is guessed")
        require(self.ngram >= 2, f"ngram={self.ngram}; an n-gram has at least 2 tokens, one and what follows it")
        require(self.pool >= 1, f"pool={self.pool}; at least 1 n-gram is kept of a first token, or nothing is drafted")
        require(
            self.window * self.levels <= MOST_NODES,
            f"window={self.window} and ngram={self.ngram} bring {self.window * self.levels} tokens into every pass, "
            f"window * (ngram - 1), and a pass takes at most {MOST_NODES} of them. Use smaller ones, say 8 and 3",
        )

    @property
    def levels(self) -> int:
        """Tokens of each place."""
        return self.ngram - 1


@dataclass
class EarlyExitConfig:
    """`early_exit`: the target's first layers."""

    exit_layer: int | None = None
    """Layers that draft, 1 to one less than the target has."""
    profile: str | None = None
    """Report of `python -m eval mode=exits`, whose recommended layer is taken in place of exit_layer."""

    def __post_init__(self) -> None:
        require(
            self.exit_layer is not None or self.profile is not None,
            "early_exit drafts with the target's first layers, and exit_layer=null does not say how many; give "
            "exit_layer=2, say, or profile=runs/exits/report, which python -m eval mode=exits measures",
        )
        require(
            self.exit_layer is None or self.profile is None,
            f"exit_layer={self.exit_layer} and profile={self.profile} both say how many layers draft; leave one out",
        )
        require(
            self.exit_layer is None or self.exit_layer >= 1, f"exit_layer={self.exit_layer}; at least 1 layer drafts"
        )


@dataclass
class CascadeConfig:
    """`cascade`: a drafter for the draft."""

    draft: str | None = None
    """Folder or hub id of the draft LM, whose tokens are proposed."""
    helper: str = "ngram"
    """What guesses them: the name of a drafter without weights, or the folder of a smaller draft LM."""
    helper_settings: dict[str, Any] = field(default_factory=dict)
    """Of a helper without weights."""

    def __post_init__(self) -> None:
        require(self.draft is not None, "a cascade drafts with a draft LM, and draft=null; give its folder")
        require(
            self.draft not in UNTRAINED,
            f"draft={self.draft} is the name of a drafter, and a cascade needs the folder of a draft LM that checks "
            "guesses; make it the helper",
        )
        require(self.helper != "early_exit", f"helper={self.helper} {ALONE}, and a helper is of the draft's. Use ngram")
        settings_of(self.helper, self.helper_settings, "helper_settings")
        require(
            not rides(self.helper, self.helper_settings),
            f"helper={self.helper} drafts from the target's passes (jacobi), and a cascade's helper drafts for the "
            "draft. Use ngram, or put jacobi and the draft into a mixture",
        )


@dataclass
class MixtureConfig:
    """`mixture`: several drafters in one tree."""

    members: list[str] = field(default_factory=list)
    """Names of drafters without weights, and folders of drafts."""
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name of a member without weights -> its settings."""

    def __post_init__(self) -> None:
        require(bool(self.members), "a mixture of nothing drafts nothing: give members, e.g. [ngram, runs/x/draft]")
        require(len(set(self.members)) == len(self.members), f"members={self.members} names one twice")
        others = sorted(set(self.settings) - set(self.members))
        require(not others, f"settings are for {others}, and members are {self.members}")
        for name in self.members:
            require(name != "early_exit", f"members={self.members}: early_exit {ALONE}. Leave it out")
            settings_of(name, self.settings.get(name, {}), f"settings.{name}")
            require(
                name == "jacobi" or not rides(name, self.settings.get(name, {})),
                f"members={self.members} has jacobi in a mixture within this one, where it hears nothing of the "
                "target. Make jacobi a member of this one",
            )


@dataclass
class ForeignConfig:
    """`foreign`: a draft LM with a tokenizer of its own."""

    draft: str | None = None
    """Folder or hub id of the draft LM, with its tokenizer."""

    def __post_init__(self) -> None:
        require(self.draft is not None, "foreign drafts with a language model, and draft=null; give its folder")
        require(
            self.draft not in UNTRAINED,
            f"draft={self.draft} is the name of a drafter; give the folder of a language model",
        )


UNTRAINED: dict[str, type] = {
    "ngram": NgramConfig,
    "edit": EditConfig,
    "retrieval": RetrievalConfig,
    "jacobi": JacobiConfig,
    "early_exit": EarlyExitConfig,
    "cascade": CascadeConfig,
    "mixture": MixtureConfig,
    "foreign": ForeignConfig,
}
"""Name, in place of a folder -> its settings."""


ALONE = "drafts chains by halves of the target's own passes, which another drafter's tokens have no part in"
"""Why early_exit is a part of no other drafter."""
CHAINS = (
    "early_exit drafts chains: in a tree its nodes lie elsewhere than those that are verified, and the early layers "
    "would run twice. Use tree=chain"
)


def check_tree(name: str | None, tree: str, where: str) -> None:
    """Raise ConfigError for a tree that this drafter does not draft."""
    require(name != "early_exit" or set(str(tree).split("x")) <= {"chain", "1"}, f"{where}={tree}: {CHAINS}")


def rides(name: str | None, settings: Mapping[str, Any]) -> bool:
    """Whether this drafter has passengers, tokens of its own in the target's passes."""
    members = settings.get("members", ()) if name == "mixture" else ()
    return name == "jacobi" or any(rides(one, settings.get("settings", {}).get(one, {})) for one in members)


UNEVEN = (
    "it makes all passes alike, and jacobi's take along more tokens than plain ones. Use another drafter, or "
    "strict=false: the text is the same but for near-ties"
)
"""Why no drafter with passengers is strict: longer passes round otherwise."""


def check_strict(name: str | None, settings: Mapping[str, Any], strict: bool, where: str) -> None:
    """Raise ConfigError for a drafter whose passes cannot be those of plain decoding bit for bit."""
    require(not strict or not rides(name, settings), f"{where}=true: {UNEVEN}")


def settings_of(name: str | None, given: Mapping[str, Any], where: str = "draft.settings") -> Any:
    """The settings of the drafter of this name; ConfigError for unknown ones, and for any of a draft that is loaded."""
    if name in UNTRAINED:
        return build(UNTRAINED[name], given, where)
    require(
        not given,
        f"{where}={dict(given)} are settings of a drafter without weights ({', '.join(UNTRAINED)}), and the draft is "
        f"{name}. Leave them out",
    )
    return None
