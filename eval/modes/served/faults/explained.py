"""What is said of counters that part."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from decode.common.progress import get_logger
from eval.modes.served.faults.faults import Each, likely_faults, total
from eval.modes.served.faults.observations import observed
from eval.modes.served.faults.reading import is_tried

log = get_logger("eval")
_DEEP = "Faults are tried on EAGLE-3 heads of one layer alone, and this one has more."
_NONE = (
    "None of the faults that were tried explains this. A prefix cache (--no-enable-prefix-caching), another revision "
    "of the draft and two faults at once look so; see what python -m train.check says of the folder that is served."
)


def explained(
    draft: str,
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    engine: Each,
    ours: Each,
    engine_name: str = "vllm",
) -> list[str]:
    """Sentences, the likely faults first, then what the counters say by themselves; see `likely_faults`."""
    seen = [f"{one[0].upper()}{one[1:]}." for one in observed(total(engine), total(ours), len(ours[0].accepted))]
    if not is_tried(draft):
        return [_DEEP, *seen]
    log.info("counters part: trying faults on %s", draft)
    found = likely_faults(draft, target, prompts, texts, engine, ours, engine_name)
    named = [f"Likely fault: {fault}." for fault in found]
    return [*(named or [_NONE]), *seen]
