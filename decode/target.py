"""Forward passes of a causal LM over a slot cache: the target, and a draft LM as well.

Rows are left-aligned and ragged: row b has its own number of tokens in the cache. One pass runs nodes of a tree per
row; they see the row's committed tokens and their own ancestors. Short passes are captured after a few uses.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.attention import grouped, pays
from decode.cache import SlotCache
from decode.capture import Pass, capture
from decode.house.errors import InputError
from decode.masks import layer_masks
from decode.models import device_of, longest_context, refuse_unsupported
from decode.packed import Packing

PREFILL_CHUNK = 512  # tokens a pass: bounds the (T, S) mask and the activations of a long prompt
BUCKET = 256  # slots: capacities and views are rounded up, so that calls of similar length share captures
CAPTURE_AFTER = 6  # uses of one shape: a capture costs about as much as that many passes
MOST_CAPTURES = 64  # of one cached model, the oldest given up first: settings of the draws are part of a capture
SAMPLE = 64  # values of a tensor that are looked at to notice silent writes: 1 ms a call for a 28M model
MOST_RUNNERS = 6  # caches kept for one model, so that batches of a few sizes can take turns


class NodePass(nn.Module):
    """Logits (B, W, V) of the last W of M nodes per row; the attention looks at the first `visible` slots under a
    mask that is made here from the inputs, so that one capture serves every position."""

    def __init__(self, model: PreTrainedModel, cache: SlotCache, held: Tensor, visible: int) -> None:
        """`held` (B, capacity): the position of the node in each slot, kept from one pass of a round to the next."""
        super().__init__()
        self.model, self.cache = model, cache
        self.config = model.config.get_text_config()
        self.slots = torch.arange(visible, device=device_of(model))
        self.held = held
        self.attention = grouped if pays(model, len(held)) else nullcontext
        self.last_position = (longest_context(model.config) or cache.capacity) - 1

    def forward(self, tokens: Tensor, starts: Tensor, depths: Tensor, above: Tensor) -> tuple[Tensor]:
        """tokens (B, W), starts (B, 1): committed tokens per row, depths (B, W), above (B, W, M) bool: ancestors.

        Node j lies in slot starts + j. Positions past the context's end belong to rows that are cut before them; they
        are clamped, so that no table overflows.
        """
        batch, width, num_nodes = above.shape
        nodes, positions = starts + self.slots[:num_nodes], starts + depths
        own = nodes[:, num_nodes - width :]
        committed = (self.slots < starts)[:, None].expand(batch, width, -1)
        visible = committed.scatter(2, nodes[:, None].expand(batch, width, num_nodes), above)
        self.held.scatter_(1, own, positions)
        keys = torch.where(self.slots < starts, self.slots, self.held[:, : len(self.slots)])
        return self._over(tokens, own, positions, visible, keys)

    def chain(self, tokens: Tensor, starts: Tensor) -> tuple[Tensor]:
        """The same for tokens that follow one another, whose slots are their positions: a third of the small steps."""
        own = starts + self.slots[: tokens.shape[1]]
        return self._over(tokens, own, own, self.slots <= own[..., None], self.slots.expand(len(tokens), -1))

    def _over(self, tokens: Tensor, own: Tensor, positions: Tensor, visible: Tensor, keys: Tensor) -> tuple[Tensor]:
        self.cache.place(own, len(self.slots))
        with self.attention(self.model):
            out = self.model(
                input_ids=tokens,
                attention_mask=layer_masks(self.config, visible, positions, keys, self.model.dtype),
                position_ids=positions.clamp(max=self.last_position),
                past_key_values=self.cache,
                use_cache=True,
            )
        return (out.logits,)


class StraightPass(nn.Module):
    """`NodePass.chain` as a module of its own, to be captured."""

    def __init__(self, node_pass: NodePass) -> None:
        super().__init__()
        self.node_pass = node_pass

    def forward(self, tokens: Tensor, starts: Tensor) -> tuple[Tensor]:
        """tokens (B, W), starts (B, 1) -> logits (B, W, V)."""
        return self.node_pass.chain(tokens, starts)


class CachedModel:
    """An unmodified transformers model with a SlotCache of B rows of at least `capacity` tokens."""

    def __init__(self, model: PreTrainedModel, batch_size: int, capacity: int, packing: Packing | None = None) -> None:
        refuse_unsupported(model.config, model.config.name_or_path or "")
        self.model, self.config = model, model.config.get_text_config()
        _refuse_foreign_attention(self.config._attn_implementation)
        self.device = device_of(model)
        self.packing = packing if packing is not None else Packing(model)
        with torch.inference_mode(mode=False), torch.no_grad():
            self.cache = SlotCache(self.config.num_hidden_layers, batch_size, _rounded(capacity))
            self._slots = torch.arange(self.cache.capacity, device=self.device)
            self._held = torch.zeros(batch_size, self.cache.capacity, dtype=torch.long, device=self.device)
            first = torch.zeros(batch_size, 1, dtype=torch.long, device=self.device)
            self.node_pass(1)(first, first, first, first[..., None] == 0)  # allocates the layers
            self.cache.stack()
        self._passes: dict[tuple[object, ...], Pass] = {}
        self._uses: dict[tuple[object, ...], int] = {}
        self.replayed = False
        """Whether the last pass was the replay of a capture, so that its time tells of later ones."""

    def visible(self, end: int) -> int:
        """Slots that a pass looks at whose last node lies before slot `end`: doubled from one bucket to the next."""
        size = BUCKET
        while size < end:
            size *= 2
        return min(size, self.cache.capacity)

    def prefill(self, ids: Tensor, begin: list[int], end: list[int]) -> None:
        """Read ids[b, begin[b]:end[b]] of each row; ids (B, T) left-aligned. What lies behind the end of a row that is
        read beside a longer one is written too, and never seen."""
        groups: dict[int, list[int]] = {}
        for row, first in enumerate(begin):
            if end[row] > first:
                groups.setdefault(first, []).append(row)
        for first, rows in groups.items():
            last = max(end[row] for row in rows)
            for start in range(first, last, PREFILL_CHUNK):
                self._read(ids, rows, start, min(start + PREFILL_CHUNK, last))

    def _read(self, ids: Tensor, rows: list[int], start: int, end: int) -> None:
        index = None if len(rows) == ids.shape[0] else torch.tensor(rows, device=self.device)
        tokens = (ids if index is None else ids[index])[:, start:end]
        positions = self._slots[start:end].expand_as(tokens)
        keys = self._slots[:end].expand(len(rows), -1)
        visible = keys[:, None] <= positions[..., None]
        self.cache.place(slice(start, end), end, index)
        self.model(
            input_ids=tokens,
            attention_mask=layer_masks(self.config, visible, positions, keys, self.model.dtype),
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )

    def forward(self, tokens: Tensor, starts: list[int], depths: Tensor, above: Tensor) -> Tensor:
        """Logits (B, W, V) of nodes tokens (B, W), the last W of M that follow the row's starts[b] committed ones.

        depths (1 or B, W) counts from the first node, above (1 or B, W, M) marks each node and its ancestors. Node j of
        the M is in slot starts[b] + j, written by this pass or an earlier one of the round.
        """
        batch, (width, num_nodes) = tokens.shape[0], above.shape[1:]
        visible = self.visible(max(starts) + num_nodes)
        begin = torch.tensor(starts, device=self.device)[:, None]
        inputs = (tokens, begin, depths.expand(batch, -1), above.expand(batch, -1, -1))

        def moved() -> tuple[Tensor, ...]:
            return tokens, (begin + 1).clamp(max=visible - num_nodes), *inputs[2:]

        return self.run((width, num_nodes, visible), lambda: self.node_pass(visible), inputs, moved)[0]

    def chain(self, tokens: Tensor, starts: list[int], strict: bool = False) -> Tensor:  # (B, W) -> (B, W, V)
        """Logits of W tokens that follow one another after the row's starts[b] committed ones.

        A strict pass looks at all slots and is captured at its first use: passes of as many tokens then run the same
        kernels wherever they are.
        """
        width = tokens.shape[1]
        visible = self.cache.capacity if strict else self.visible(max(starts) + width)
        assert max(starts) + width <= visible, (starts, width, visible)  # else the last tokens would not see themselves
        begin = torch.tensor(starts, device=self.device)[:, None]

        def moved() -> tuple[Tensor, ...]:
            return tokens, (begin + 1).clamp(max=visible - width)

        def make() -> StraightPass:
            return StraightPass(self.node_pass(visible))

        return self.run(("straight", width, visible), make, (tokens, begin), moved, strict)[0]

    def node_pass(self, visible: int) -> NodePass:
        """The pass over the first `visible` slots, not captured."""
        return NodePass(self.model, self.cache, self._held, visible)

    def run(
        self,
        key: tuple[object, ...],
        make: Callable[[], nn.Module],
        inputs: tuple[Tensor, ...],
        moved: Callable[[], tuple[Tensor, ...]],
        at_once: bool = False,
    ) -> tuple[Tensor, ...]:
        """The module that `make` makes, at `inputs`, by its capture once `key` has been used often enough, or at once.

        `moved()` are the inputs of the same pass over a later slot (see `capture.capture`): a check there writes only
        where nothing is committed.
        """
        self.replayed = key in self._passes
        if key not in self._passes:
            self._uses[key] = self._uses.get(key, 0) + 1
            if not at_once and self._uses[key] < CAPTURE_AFTER:
                return make()(*inputs)
            self._passes[key] = capture(make(), inputs, moved(), self.packing)
            if len(self._passes) > MOST_CAPTURES:
                oldest = next(iter(self._passes))
                del self._passes[oldest], self._uses[oldest]
        return self._passes[key](*inputs)

    def commit(self, starts: list[int], path: Tensor, is_chain: bool) -> None:
        """Bring the accepted path (B, D + 1) of the last pass to the slots of its positions; a chain lies there
        already."""
        if not is_chain:
            self.cache.move(torch.tensor(starts, device=self.device)[:, None], path)


class Runners:
    """The cached models of one model, the least used one given up first; kept on the model, so that they end with it
    (a table elsewhere would hold the model for ever, since they refer to it)."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.packing = Packing(model)
        self.weights = weights_state(model)
        self._kept: dict[tuple[str, int, int], CachedModel] = {}

    def get(self, model: PreTrainedModel, role: str, batch_size: int, capacity: int) -> CachedModel:
        """The cached model of this size."""
        key = (role, batch_size, _rounded(capacity))
        runner = self._kept.pop(key, None) or CachedModel(model, batch_size, capacity, self.packing)
        self._kept[key] = runner
        if len(self._kept) > MOST_RUNNERS:
            del self._kept[next(iter(self._kept))]
        return runner

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copied or pickled model makes its own."""
        return type(None), ()


def runner_for(model: PreTrainedModel, batch_size: int, capacity: int, role: str = "target") -> CachedModel:
    """The cached model for this many rows of this many tokens, kept with its captures from one call to the next.

    `role` keeps the caches of a model apart that drafts for itself. One call at a time: two threads must not decode
    with the same model object.
    """
    kept = vars(model).get("_draftsmith_runners")
    if kept is None or kept.weights != weights_state(model):  # packed weights are copies: training makes them stale
        kept = vars(model)["_draftsmith_runners"] = Runners(model)
    return kept.get(model, role, batch_size, capacity)


def weights_state(model: nn.Module) -> int:
    """Changes when a parameter or buffer is replaced, moved or written to, and when a module is exchanged, hooked or
    set otherwise (train mode, an adapter switched on): a capture would not notice.

    Writes that bypass torch's version counter (`.data`, inference mode) show in a sample of the values on a CPU, where
    packed weights are copies.
    """
    tensors = (_tensor_state(one) for one in (*model.parameters(), *model.buffers()))
    return hash((*tensors, *(_module_state(module) for module in model.modules())))


def _tensor_state(tensor: Tensor) -> tuple[object, ...]:
    version = 0 if tensor.is_inference() else tensor._version
    if tensor.device.type != "cpu" or not tensor.is_floating_point():
        return tensor.data_ptr(), tensor.dtype, version
    sample = tensor.detach().reshape(-1)[:: max(1, tensor.numel() // SAMPLE)]
    return tensor.data_ptr(), tensor.dtype, version, float(sample.double().sum())


def _module_state(module: nn.Module) -> tuple[object, ...]:
    plain = (value for value in vars(module).values() if isinstance(value, bool | int | float | str))
    return id(module), len(module._forward_hooks), len(module._forward_pre_hooks), *plain


def _rounded(capacity: int) -> int:
    return -(-capacity // BUCKET) * BUCKET


def _refuse_foreign_attention(name: str | None) -> None:
    if name not in ("sdpa", "eager"):
        raise InputError(
            f"attention {name!r} takes no explicit masks, so rejected tokens and other rows would be seen; load the "
            "model with attn_implementation='sdpa'"
        )
