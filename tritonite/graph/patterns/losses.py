"""Cross entropy to `tritonite::cross_entropy`, in graphs of inference.

The logits are read once, and log-probabilities are never in memory. Logits that are converted to float32 for the loss
alone are read as they are. A target that is neither a class nor ignored makes the loss nan, where ATen stops.
"""

from __future__ import annotations

import torch
from torch import fx

from tritonite.graph.patterns.matching import Call, Capture, Converted, aten, is_call, is_tensor, matches, tensor
from tritonite.graph.patterns.rewrite import NotReplaced, Rewriter, like, used_inside

_REDUCTIONS = ("none", "mean", "sum")
_LOGITS = Converted(Capture("logits", is_tensor), "wide")
_LOSS = Call(
    (aten.nll_loss_forward.default,),
    (
        Call((aten._log_softmax.default,), (_LOGITS, Capture("dim"), False)),
        Capture("target", is_tensor),
        Capture("weight"),
        Capture("reduction"),
        Capture("ignore_index"),
    ),
)


def cross_entropy(rewriter: Rewriter, node: fx.Node) -> dict[fx.Node, fx.Node] | None:
    """Replace the negative log-likelihood of a log-softmax."""
    if not is_call(node, aten.nll_loss_forward.default):
        return None
    for match in matches(_LOSS, node):
        logits, wide = tensor(match["logits"]), tensor(match.get("wide"))
        assert logits is not None
        if logits.dim() != 2 or match["dim"] not in (-1, 1) or match["reduction"] not in range(3):
            continue
        if wide is not None and (wide.dtype is not torch.float32 or logits.dtype.itemsize != 2):
            continue
        # The other result, the total of the weights, is read by a backward pass.
        if any(user.args[1] != 0 for user in node.users):
            raise NotReplaced
        used_inside(match.nodes, [node])
        rewriter.at(node, (match["logits"], match["target"], match["weight"]))
        call = rewriter.call(
            torch.ops.tritonite.cross_entropy.default,
            *(match["logits"], match["target"], match["weight"], None, match["ignore_index"]),
            *(_REDUCTIONS[match["reduction"]], 0.0, None, 0.0, False, False, False),
        )
        made = {}
        for user in node.users:
            loss, dtype = rewriter.item(call, 0), user.meta["val"].dtype
            if loss.meta["val"].dtype is not dtype:
                loss = rewriter.call(aten._to_copy.default, loss, dtype=dtype)
            made[user] = like(loss, user)
        return made
    return None
