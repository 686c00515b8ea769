"""Text Generation Inference (read and not run): Medusa heads alone."""

from __future__ import annotations

from train.export.engines.base import FORMS, Engine

_MEDUSA_ALONE = "TGI drafts with Medusa heads alone; train draft=medusa instead"
ENGINE = Engine("tgi", "TGI 3.3", dict.fromkeys(FORMS, _MEDUSA_ALONE) | {"medusa": "not written yet"})
