"""Every hypothesis."""

from __future__ import annotations

from eval.modes.served.faults.heads import OF_FORMS
from eval.modes.served.faults.layers import LAYERS
from eval.modes.served.faults.states import STATES
from eval.modes.served.faults.vocabulary import VOCABULARY

HYPOTHESES = (*VOCABULARY, *STATES, *LAYERS, *OF_FORMS)
