"""decode.tree=auto and sequoia: from what was measured on this machine to the shape of a round."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from statistics import median
from typing import TypeVar
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from decode.autotune.rank_profile import acceptance_profile
from decode.autotune.store import (
    Key,
    PairCalibration,
    Trial,
    folder_beside,
    load_calibration,
    pair_key,
    save_calibration,
)
from decode.autotune.timing import measure_rounds, takes
from decode.common.progress import get_logger
from decode.common.typed_config import require
from decode.drafters.base import Drafter
from decode.loop import Loop, Request
from decode.models.load import longest_context
from decode.trees.sequoia import Planner, Profile, expected_tokens
from decode.trees.tree_plans import BEAM, Dynamic, Shape, Static, chain, comb, describe

ShapeT = TypeVar("ShapeT", bound=Shape)
log = get_logger("decode")

RANKS = 8  # candidates after pending whose acceptance is measured
MOST_NODES = 31  # draft tokens of the largest tree that is considered: with pending, the largest pass that is timed
MOST_LEVELS = 12
DYNAMIC = ((6, 4), (12, 6), (16, 8), (24, 10))  # (draft nodes, levels): about half as many levels as nodes did best
TOKENS, TOKENS_A_ROW = 192, 48  # that a calibration generates: so many, shared by the rows, and at least so many each
RUNS = 2  # of each nominee, in turn: the faster one counts, since the first captures and other programs only slow down
_known: WeakKeyDictionary[Drafter, dict[str, PairCalibration]] = WeakKeyDictionary()
_chosen: WeakKeyDictionary[Drafter, dict[str, Shape]] = WeakKeyDictionary()


def resolve(tree: str, tree_nodes: int, model: PreTrainedModel, drafter: Drafter | None, request: Request) -> Shape:
    """The shape that `tree` (auto or sequoia) stands for; measured on the request's own prompts at the first call.

    Raises ConfigError for a drafter that does not draft the trees it is asked for, and with `strict`.
    """
    require(
        not request.strict,
        f"strict=true pads every pass to a chain of one length, and tree={tree} may choose none. Use tree=chain, or "
        "strict=false",
    )
    if drafter is None:
        return chain(0)
    short = _shortened(model, request)
    key = pair_key(model, drafter, short, short.batch_size or 1)
    name, chosen = json.dumps([tree, tree_nodes, key]), _chosen.setdefault(drafter, {})
    if name not in chosen:
        calibration = calibrated(tree, model, drafter, short, key)
        chosen[name], speedup = choose(tree, tree_nodes, calibration, request)
        log.info("tree=%s: %s, %.2f times plain decoding by its calibration", tree, describe(chosen[name]), speedup)
    return chosen[name]


def choose(tree: str, tree_nodes: int, calibration: PairCalibration, request: Request) -> tuple[Shape, float]:
    """(shape, speedup over plain decoding): of auto the fastest that was tried, of sequoia the best tree of at most
    `tree_nodes` draft tokens."""
    if tree == "auto":
        best = max(calibration.trials, key=lambda trial: trial.tokens_per_s)
        return best.shape, best.tokens_per_s / calibration.trials[0].tokens_per_s
    shape = _fastest(static_plans(calibration.profile, tree_nodes), calibration, request)
    return shape, speedup(shape, calibration)


def speedup(shape: Static, calibration: PairCalibration) -> float:
    """Expected tokens of a round and what it costs, over plain decoding."""
    costs = calibration.costs
    return expected_tokens(shape.parents, calibration.profile) * costs.t_target[1] / costs.seconds(shape)


def calibrated(tree: str, model: PreTrainedModel, drafter: Drafter, request: Request, key: Key) -> PairCalibration:
    """What is known of this pair here: from memory, from the draft's folder, or measured now by `request` and kept in
    both."""
    name, folder = json.dumps(key), folder_beside(drafter, key)
    known = _known.setdefault(drafter, {})
    calibration = known.get(name) or (load_calibration(folder, key) if folder else None)
    if calibration is None or (tree == "auto" and not calibration.trials):
        calibration = _measured(tree, model, drafter, request, calibration)
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


def _measured(
    tree: str, model: PreTrainedModel, drafter: Drafter, request: Request, known: PairCalibration | None
) -> PairCalibration:
    """Profile and costs where they are not known yet; for auto, trials."""
    log.info("tree=%s: measuring what trees cost and bring here; kept beside the draft", tree)
    if known is None:
        profile = acceptance_profile(model, drafter, request, _candidates(drafter, request))
        context = max(map(len, request.prompts)) + request.max_new_tokens // 2
        known = PairCalibration(profile, measure_rounds(model, drafter, request, context, request.batch_size or 1))
    if tree == "auto":
        shapes = [chain(0), *nominees(known, request)]
        runs = [[_try(shape, model, drafter, request) for shape in shapes] for _ in range(RUNS)]
        known = replace(known, trials=[min(same, key=lambda one: one.round_s) for same in zip(*runs, strict=True)])
    return known


def _candidates(drafter: Drafter, request: Request) -> list[int]:
    """How many candidates are looked at, depth by depth.

    One depth does for a draft that reads text alone, drafted or not. One that starts from hidden states of the target
    is further from them at every depth; the deeper, the fewer siblings a good tree has.
    """
    widths = [max(2, RANKS - depth) for depth in range(MOST_LEVELS)] if drafter.taps else [RANKS]
    return widths if takes(request, comb(widths)) else [1] * len(widths)


def nominees(calibration: PairCalibration, request: Request) -> list[Static | Dynamic]:
    """The best chain, the best static tree and the best dynamic trees, by profile and costs."""
    plans = static_plans(calibration.profile, MOST_NODES)
    kinds = [[plan for plan in plans if plan.is_chain], [plan for plan in plans if not plan.is_chain]]
    chosen: list[Static | Dynamic] = [_fastest(kind, calibration, request) for kind in kinds if _taken(kind, request)]
    dynamic = [Dynamic(depth, BEAM, 1 + nodes) for nodes, depth in DYNAMIC]
    by_cost = sorted(_taken(dynamic, request), key=lambda shape: _dynamic_cost(shape, calibration))
    return chosen + by_cost[:2]


def static_plans(profile: Profile, num_draft_nodes: int) -> list[Static]:
    """Chains and optimal trees of up to so many draft tokens."""
    planner = Planner(profile)
    levels = min(num_draft_nodes, MOST_LEVELS)
    plans = [chain(k) for k in range(1, levels + 1)]
    plans += [planner.tree(n, depth) for n in range(2, num_draft_nodes + 1) for depth in range(1, min(n, levels) + 1)]
    return [plan for plan in dict.fromkeys(plans) if plan.depth]


def _taken(shapes: Iterable[ShapeT], request: Request) -> list[ShapeT]:
    return [shape for shape in shapes if takes(request, shape)]


def _fastest(plans: list[Static], calibration: PairCalibration, request: Request) -> Static:
    return max(_taken(plans, request), key=lambda shape: speedup(shape, calibration))


def _dynamic_cost(shape: Dynamic, calibration: PairCalibration) -> float:
    """Seconds a token if the tree were the best one known beforehand: it brings more, all sizes alike."""
    like = Planner(calibration.profile).tree(shape.num_nodes - 1, shape.depth)
    return calibration.costs.seconds(shape) / expected_tokens(like.parents, calibration.profile)


def _try(shape: Static | Dynamic, model: PreTrainedModel, drafter: Drafter, request: Request) -> Trial:
    """Decode with it. The first rounds of a shape run uncaptured; the median passes over them."""
    stats = Loop(model, drafter, replace(request, shape=shape)).run()[1]
    bursts = stats.arrival_s
    rounds = [after - before for before, after in zip(bursts, bursts[1:], strict=False)]
    return Trial(shape, stats.tau, median(rounds or bursts))
