"""What a user sets about `mode=drafters`; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from decode.common.typed_config import require, require_at_least, require_some, whole
from decode.config import require_scheme
from decode.drafters.beside.refusals import check_overlap, presumed_family
from decode.drafters.untrained.config import UNTRAINED, check_strict, check_tree, settings_of
from decode.sampling.config import SamplingConfig
from eval.comparison_config import OWN, PLAIN, ComparisonConfig
from eval.modes.compare.way import Way

Text = Literal["code", "free", "edit", "answer", "log", "own"]
TASKS: tuple[Text, ...] = ("edit", "answer", "log")
NAME, DRAFT, DATASTORE = "NAME", "DRAFT", "DATASTORE"
"""What `drafts` and `drafters.datastore` fill in."""
_KEYS = ("draft", "settings", "texts")


@dataclass
class DraftersConfig(ComparisonConfig):
    """`mode=drafters`: ways to draft, and the texts, batches and temperatures at which they are timed."""

    texts: list[Text] = field(default_factory=lambda: ["code", "free", "edit", "answer", "log"])
    """Kinds of text: code (windows of held-out documents) and free (how docstrings begin) are continued; edit, answer
    and log are tasks made of the corpus; own are the prompts of prompts.file, which are timed wherever it is given, and
    each of prompts.kinds apart."""
    tasks_target: str | None = None
    """Folder or hub id of the target that was trained on such tasks, and writes edit, answer and log; null: `target`
    writes them."""
    arms: dict[str, dict[str, Any]] = field(default_factory=lambda: {"ngram": {"draft": "ngram"}})
    """Name -> a way to draft: `draft` (a folder, or a drafter without training), its `settings`, `texts` (all, unless
    named), and changes of `decode`; num_draft_tokens may be a list of lengths to try. A
    folder has one setting, quantization (int8, int4, int8_dynamic). DATASTORE in its settings is `datastore`."""
    draft_arms: dict[str, dict[str, Any]] = field(default_factory=lambda: {"NAME": {"draft": "DRAFT"}})
    """The same for each of `drafts`, whose name and folder stand for NAME and DRAFT."""
    datastore: str | None = None
    """Folder that python -m distill.datastore wrote; arms that name DATASTORE are left out where it is null."""
    draft_lengths: list[int] = field(default_factory=lambda: [4, 8, 12])
    """Draft lengths tried with each arm, on prompts that are not reported; the fastest of a cell is timed."""
    batch_sizes: list[int] = field(default_factory=lambda: [1, 8])
    """Prompts decoded at once; each is a cell at each temperature and for each kind of text."""
    batches_timed: list[int] = field(default_factory=lambda: [8, 2])
    """Batches of prompts timed in a cell, by batch size."""
    screening_prompts: int = 3
    """Prompts, from the validation split, on which a cell's settings are chosen; at least one batch."""
    choices: str | None = None
    """results.json of an earlier run, whose choices are taken; null chooses. So several processes time the same
    settings."""

    def __post_init__(self) -> None:
        require(bool(self.texts), f"drafters.texts is empty; name some of {', '.join(get_args(Text))}")
        require(len(set(self.texts)) == len(self.texts), f"drafters.texts={self.texts} repeats one; name each once")
        some = {"batch_sizes": "[1]", "draft_lengths": "[4]", "arms": "'+drafters.arms.ngram={draft: ngram}'"}
        require_some(self, "drafters.", **some)
        self.check_batches("drafters")
        require_at_least(1, self, "drafters.", "screening_prompts")

    def texts_with(self, file_kinds: Sequence[str]) -> list[str]:
        """All kinds of text of a run, those of prompts.file last."""
        return [*(text for text in self.texts if text != OWN), *file_kinds]

    def ways(self, drafts: Mapping[str, str]) -> list[Way]:
        """Every way to draft in the order of the configuration, those that want a datastore only where there is one;
        ConfigError for what cannot be."""
        filled = {} if self.datastore is None else {DATASTORE: self.datastore}
        found = [
            self._way(name, _filled(given, filled), f"drafters.arms.{name}")
            for name, given in self.arms.items()
            if not self.lacks_datastore(given)
        ]
        for draft, path in drafts.items():
            for template, given in self.draft_arms.items():
                if self.lacks_datastore(given):
                    continue
                where = f"drafters.draft_arms.{template}"
                is_asked = _filled(given, {}).get("draft") == DRAFT
                one = _filled(given, {**filled, DRAFT: path, NAME: draft})
                found.append(replace(self._way(template.replace(NAME, draft), one, where, is_asked), is_of_draft=True))
        names = [one.name for one in found]
        twice = sorted({name for name in names if names.count(name) > 1})
        require(not twice, f"two arms are called {', '.join(twice)} in drafters.arms, drafters.draft_arms and drafts")
        return found

    def lacks_datastore(self, given: Mapping[str, Any]) -> bool:
        """Whether an arm is left out for want of one."""
        return self.datastore is None and DATASTORE in _texts_in(given)

    def without_datastore(self, text: str) -> list[str]:
        """Arms for a text that are left out for want of a datastore."""
        given = [(name, one) for arms in (self.arms, self.draft_arms) for name, one in arms.items()]
        lacking = [(name, one) for name, one in given if self.lacks_datastore(one)]
        return [name for name, one in lacking if as_known(text) in self._texts(one.get("texts"), name)]

    def _way(self, name: str, given: Mapping[str, Any], where: str, is_asked: bool = True) -> Way:
        require(name != PLAIN, f"{where} is called {PLAIN}, which is decoding without a draft; call it otherwise")
        require(isinstance(given, Mapping), f"{where}={given!r} is no arm; give e.g. {{draft: ngram}}")
        known = {one.name for one in fields(SamplingConfig)} - {"temperature", "max_new_tokens"} | set(_KEYS)
        unknown = sorted(set(given) - known)
        require(not unknown, f"{where} has unknown keys {unknown}; known are {', '.join(sorted(known))}")
        draft, settings = given.get("draft"), given.get("settings") or {}
        require(
            isinstance(draft, str) and bool(draft),
            f"{where}.draft={draft!r} names nothing that drafts; give a draft's folder, or one of "
            f"{', '.join(UNTRAINED)}",
        )
        require(
            isinstance(settings, Mapping), f"{where}.settings={settings!r} are no settings; give e.g. {{memory: 0}}"
        )
        check_settings(str(draft), settings, f"{where}.settings")
        tree = given.get("tree", "chain")
        check_tree(draft, tree, f"{where}.tree")
        return Way(
            name,
            str(draft),
            dict(settings),
            {key: value for key, value in given.items() if key not in (*_KEYS, "num_draft_tokens")},
            self._lengths(given.get("num_draft_tokens"), where),
            self._texts(given.get("texts"), where),
            is_asked,
        )

    def _lengths(self, given: Any, where: str) -> tuple[int, ...]:
        each = self.draft_lengths if given is None else given if isinstance(given, list) else [given]
        lengths = tuple(whole(k, f"{where}.num_draft_tokens", 1) for k in each)
        require(
            bool(lengths) and len(set(lengths)) == len(lengths),
            f"{where}.num_draft_tokens={given} or drafters.draft_lengths={self.draft_lengths} is empty or repeats a "
            "length; name each once",
        )
        return lengths

    def _texts(self, given: Any, where: str) -> tuple[str, ...]:
        texts = get_args(Text) if given is None else given if isinstance(given, list) else [given]
        unknown = [one for one in texts if one not in get_args(Text)]
        require(not unknown, f"{where}.texts names {unknown}; known are {', '.join(get_args(Text))}")
        return tuple(texts)

    def check(
        self,
        drafts: Mapping[str, str],
        file_kinds: Sequence[str],
        decode: SamplingConfig,
        temperatures: Sequence[float],
    ) -> None:
        """ConfigError for arms that cannot be, and for texts that nothing is there for."""
        require(
            bool(file_kinds) or OWN not in self.texts,
            "drafters.texts names own, the prompts of prompts.file, which is not set; give prompts.file=FILE.jsonl",
        )
        taken = sorted(set(file_kinds) & set(get_args(Text)) - {OWN})
        require(
            not taken,
            f"prompts.kinds names {', '.join(taken)}, and so does drafters.texts texts of the corpus: those would be "
            "timed in their place. Call these kinds otherwise",
        )
        ways = self.ways(drafts)
        for text in self.texts_with(file_kinds):
            require(
                any(as_known(text) in way.texts for way in ways),
                f"no arm of drafters.arms is for text={text}, so nothing would be compared there; add {text} to the "
                "texts of an arm, or leave it out of drafters.texts",
            )
        for way in ways:
            strict = way.changes.get("strict", decode.strict)
            check_strict(way.draft, way.settings, strict, f"drafters.arms.{way.name}.strict")
            overlap = way.changes.get("overlap", decode.overlap)
            check_overlap(presumed_family(way.draft), overlap, f"drafters.arms.{way.name}.overlap")
            for temperature in temperatures:
                way.sampling(decode, temperature)


def as_known(text: str) -> str:
    """What arms call a kind of text: the kinds of a file's questions are the user's own."""
    return text if text in get_args(Text) else OWN


def check_settings(draft: str, settings: Mapping[str, Any], where: str) -> None:
    """ConfigError for settings that the drafter does not have; a draft in a folder has `quantization`."""
    of_folder = draft not in UNTRAINED and set(settings) == {"quantization"}
    if of_folder:
        require_scheme(settings["quantization"], f"{where}.quantization", "leave it out")
    settings_of(draft, {} if of_folder else settings, where)


def _filled(content: Any, words: Mapping[str, str]) -> Any:
    """`content` with each of `words` replaced where it stands as a whole text, as a key too."""
    if isinstance(content, Mapping):
        return {_filled(key, words): _filled(value, words) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_filled(one, words) for one in content]
    return words.get(content, content) if isinstance(content, str) else content


def _texts_in(content: Any) -> set[str]:
    if isinstance(content, Mapping):
        return {text for pair in content.items() for one in pair for text in _texts_in(one)}
    if isinstance(content, list | tuple):
        return {text for one in content for text in _texts_in(one)}
    return {content} if isinstance(content, str) else set()
