"""Text Generation Inference (server/text_generation_server/layers)."""

from __future__ import annotations

from tests.train.export.loaders.base import Fields, Loader


def _room(fields: Fields) -> set[str]:
    """All heads in one: it reads `--speculate` of them, and every one of its residual layer."""
    return {f"linear.{part}[{head}]" for head in range(fields["medusa_num_heads"]) for part in ("weight", "bias")}


LOADERS = {
    "medusa": Loader(
        source="medusa.py at 91560ed93, MedusaHeadV2; speculative.py at c09f5bc93; models/__init__.py, get_model",
        rules={
            r"(\d+)\.0\.linear\.(weight|bias)": r"linear.\2[\1]",
            r"lm_heads\.0\.weight": None,  # it has the target's
        },
        room=_room,
        demands={
            "no architectures, else it loads no heads": lambda ours, target: "architectures" not in ours,
            "medusa_num_heads": lambda ours, target: ours["medusa_num_heads"] >= 1,
            "one residual layer": lambda ours, target: ours["medusa_num_layers"] == 1,
            "the target": lambda ours, target: bool(ours["base_model_name_or_path"]),
        },
    ),
}
