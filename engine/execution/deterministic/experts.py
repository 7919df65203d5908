"""A mixture of experts in which a token's computation does not depend on the rest of the batch.

A chosen expert computes every row of the forward pass, so that its matrices have the size of the forward
pass. Rows that did not choose it do not change. Experts add up in order. In transformers each expert computes
only its rows, whose number depends on the batch.
"""

import torch
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

EXPERTS_NAME = "tokenmill_whole_rows"
"""The name under which transformers knows `whole_rows_experts`."""


def use_whole_rows(model: PreTrainedModel) -> None:
    """Use `whole_rows_experts` in a model, if its class allows it."""
    ExpertsInterface.register(EXPERTS_NAME, whole_rows_experts)
    model.set_experts_implementation(EXPERTS_NAME)


def whole_rows_experts(
    module: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Called by transformers for a layer's experts: `hidden_states` [rows, size], the others [rows, k]."""
    out = torch.zeros_like(hidden_states)
    for expert in sorted(set(top_k_index.flatten().tolist())):
        chosen = top_k_index == expert
        weight = (top_k_weights * chosen).sum(-1, keepdim=True)
        found = (_expert(module, expert, hidden_states) * weight).to(out.dtype)
        out = torch.where(chosen.any(-1, keepdim=True), out + found, out)
    return out


def _expert(module: torch.nn.Module, expert: int, rows: torch.Tensor) -> torch.Tensor:
    if module.has_gate:
        rows = module._apply_gate(_linear(module, "gate_up_proj", expert, rows))  # type: ignore[operator]
    else:
        rows = module.act_fn(_linear(module, "up_proj", expert, rows))  # type: ignore[operator]
    rows = _linear(module, "down_proj", expert, rows)
    if module.has_post_expert_norm:
        rows = module.post_expert_norm(rows)  # type: ignore[operator]
    return rows


def _linear(module: torch.nn.Module, name: str, expert: int, rows: torch.Tensor) -> torch.Tensor:
    weight = getattr(module, name)[expert]
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    return torch.nn.functional.linear(rows, weight.T if module.is_transposed else weight, bias)
