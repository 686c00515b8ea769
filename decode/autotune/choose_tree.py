"""decode.tree=sequoia: which of a node's candidates stands, seen on text that the target writes itself, and from that
and what passes cost on this machine the tree of a round."""

from __future__ import annotations

import json
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from decode.autotune.store import Key, PairCalibration, folder_beside, load_calibration, pair_key, save_calibration
from decode.autotune.timing import measure_rounds, takes
from decode.common.errors import ConfigError
from decode.common.progress import get_logger
from decode.drafters.base import Drafter
from decode.loop import Loop
from decode.models.compatibility import longest_context
from decode.requests import Request
from decode.trees.sequoia import Planner, Profile, expected_tokens
from decode.trees.tree import Tree
from decode.trees.tree_plans import Static, chain, comb, describe
from decode.verify.verdict import Question, Verdict

log = get_logger("decode")

RANKS = 8  # candidates after pending whose acceptance is measured
MOST_LEVELS = 12
TOKENS, TOKENS_A_ROW = 192, 48  # that a calibration generates: so many, shared by the rows, and at least so many each
_known: WeakKeyDictionary[Drafter, dict[str, PairCalibration]] = WeakKeyDictionary()
_chosen: WeakKeyDictionary[Drafter, dict[str, Static]] = WeakKeyDictionary()


def resolve(tree_nodes: int, model: PreTrainedModel, drafter: Drafter | None, request: Request) -> Static:
    """The best tree of at most `tree_nodes` draft tokens; measured on the request's own prompts at the first call.

    Raises ConfigError for a drafter that does not draft the trees it is asked for.
    """
    if drafter is None:
        return chain(0)
    short = _shortened(model, request)
    key = pair_key(model, drafter, short, short.batch_size or 1)
    name, chosen = json.dumps([tree_nodes, key]), _chosen.setdefault(drafter, {})
    if name not in chosen:
        chosen[name], speedup = choose(tree_nodes, calibrated(model, drafter, short, key), request)
        log.info("tree=sequoia: %s, %.2f times plain decoding by its calibration", describe(chosen[name]), speedup)
    return chosen[name]


def choose(tree_nodes: int, calibration: PairCalibration, request: Request) -> tuple[Static, float]:
    """(shape, expected speedup over plain decoding) of the fastest chain or tree of at most `tree_nodes` draft
    tokens."""
    rates = [
        (speedup(plan, calibration), plan)
        for plan in static_plans(calibration.profile, tree_nodes)
        if takes(request, plan)
    ]
    rate, shape = max(rates, key=lambda one: one[0])
    return shape, rate


def speedup(shape: Static, calibration: PairCalibration) -> float:
    """Expected tokens of a round and what it costs, over plain decoding."""
    costs = calibration.costs
    return expected_tokens(shape.parents, calibration.profile) * costs.t_target[1] / costs.seconds(shape)


def calibrated(model: PreTrainedModel, drafter: Drafter, request: Request, key: Key) -> PairCalibration:
    """What is known of this pair here: from memory, from the draft's folder, or measured now by `request` and kept in
    both."""
    name, folder = json.dumps(key), folder_beside(drafter, key)
    known = _known.setdefault(drafter, {})
    calibration = known.get(name) or (load_calibration(folder, key) if folder else None)
    if calibration is None:
        calibration = _measured(model, drafter, request)
        if folder is not None:
            save_calibration(folder, key, calibration)
    known[name] = calibration
    return calibration


def _shortened(model: PreTrainedModel, request: Request) -> Request:
    """The first prompts of a request, a row each and at least two, with a short text to come."""
    size = min(request.batch_size or len(request.prompts), len(request.prompts))
    prompts = request.prompts[: max(2, size)]
    limit = longest_context(model.config)
    wanted = max(TOKENS_A_ROW, TOKENS // len(prompts))
    new = wanted if limit is None else max(1, min(wanted, limit - max(map(len, prompts))))
    rows = None if request.rows is None else request.rows[: len(prompts)]
    return replace(
        request, prompts=prompts, max_new_tokens=new, batch_size=size, rows=rows, adaptive=False, confidence=False
    )  # fmt: skip


def _measured(model: PreTrainedModel, drafter: Drafter, request: Request) -> PairCalibration:
    log.info("tree=sequoia: measuring what trees cost and bring here; kept beside the draft")
    profile = acceptance_profile(model, drafter, request, _candidates(drafter, request))
    context = max(map(len, request.prompts)) + request.max_new_tokens // 2
    return PairCalibration(profile, measure_rounds(model, drafter, request, context, request.batch_size or 1))


def _candidates(drafter: Drafter, request: Request) -> list[int]:
    """How many candidates are looked at, depth by depth.

    One depth does for a draft that reads text alone, drafted or not. One that starts from hidden states of the target
    is further from them at every depth; the deeper, the fewer siblings a good tree has.
    """
    widths = [max(2, RANKS - depth) for depth in range(MOST_LEVELS)] if drafter.taps else [RANKS]
    return widths if takes(request, comb(widths)) else [1] * len(widths)


def static_plans(profile: Profile, num_draft_nodes: int) -> list[Static]:
    """Chains and optimal trees of up to so many draft tokens."""
    planner = Planner(profile)
    levels = min(num_draft_nodes, MOST_LEVELS)
    plans = [chain(k) for k in range(1, levels + 1)]
    plans += [planner.tree(n, depth) for n in range(2, num_draft_nodes + 1) for depth in range(1, min(n, levels) + 1)]
    return [plan for plan in dict.fromkeys(plans) if plan.depth]


def acceptance_profile(
    model: PreTrainedModel, drafter: Drafter, request: Request, widths: list[int]
) -> list[list[float]]:
    """a[d][b] = P(the b-th candidate of a node at depth d is the one that stands, if the node does), of widths[d]
    candidates, over every position that `request` generates; 0 at depths that are never reached or not drafted.

    Drafter, rule and noise are those of decoding; the text grows by one token a round, so that positions which are easy
    to draft count no less than others. Of a depth, the candidates after the best one of the depth before are looked at
    where that one stands: the product of a along a chain is what the chain is accepted with, however its tokens hang
    together. Raises ConfigError for a drafter that does not draft the trees it is asked for.
    """
    loop = Loop(model, drafter, replace(request, shape=comb(widths), adaptive=False))
    meter = RankMeter(loop, widths)
    loop.verifier = meter
    loop.run()
    return [[count / max(1, asked) for count in row] for row, asked in zip(meter.stood, meter.asked, strict=True)]


class RankMeter:
    """A rule that notes which candidates stand, and lets the text grow by one token."""

    on_host = True

    def __init__(self, loop: Loop, widths: list[int]) -> None:
        self._loop, self._rule = loop, loop.verifier
        self.shares_noise = loop.verifier.shares_noise
        self.drawn = loop.verifier.drawn
        self._wanted = comb(widths)
        self._ranks = [0, *(rank for width in widths for rank in range(width))]  # of each node
        self.stood = [[0] * width for width in widths]
        self.asked = [0] * len(widths)

    def __call__(self, question: Question) -> Verdict:
        verdict, tree = self._rule(question), question.tree
        if tree.num_nodes > 1:  # the last token of a text is not drafted
            self._check(tree)
            accepted, paths = verdict.num_accepted.tolist(), verdict.path.tolist()
            for row in self._loop.rows.running:
                self._note([self._ranks[node] for node in paths[row][1 : accepted[row] + 1]], tree.max_depth)
        return Verdict(torch.zeros_like(verdict.path), torch.zeros_like(verdict.num_accepted), verdict.tokens)

    def _note(self, accepted: list[int], depth: int) -> None:
        """Ranks of one row's accepted nodes in a tree of this depth."""
        for at in range(depth):
            self.asked[at] += 1
            if at == len(accepted):  # none stood
                return
            self.stood[at][accepted[at]] += 1
            if accepted[at]:  # only the first one has candidates after it
                return

    def _check(self, tree: Tree) -> None:
        wanted = self._wanted.cut(tree.max_depth).parents  # heads draft as many tokens as they are
        if tree.parents != wanted:
            raise ConfigError(
                f"decode.tree=sequoia compares trees, but {type(self._loop.drafter).__name__} drafts parents "
                f"{tree.parents} where {wanted} are asked for. Name the plan yourself: decode.tree=chain and "
                "decode.num_draft_tokens"
            )
