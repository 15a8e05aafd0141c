"""Torch functions for the kernels of Model Runner V2 that a decode step launches, for CPUs.

Triton's interpreter runs those kernels as they are, at 10 to 100 times the cost of a whole
step of a small model. vLLM has a hook to replace single kernels on other platforms
(`vllm.triton_utils.dispatcher`); this is what is put there. Each function takes its kernel's
arguments in the kernel's order, and writes what the kernel writes. Runs with and without
SpecBlock use the same ones, so neither comparison nor exactness depends on them.

Reading values with `.tolist()` is free here: every tensor of this file is in host memory.
"""

from __future__ import annotations

from vllm_specblock.engine.cpu import batches, gumbel, sampling

_AT = "vllm.v1.worker.gpu."

KERNELS = {
    _AT + "sample.gumbel._gumbel_sample_kernel": gumbel.gumbel_sample,
    _AT + "sample.gumbel._temperature_kernel": sampling.temperature,
    _AT + "sample.min_p._min_p_kernel": sampling.min_p,
    _AT + "sample.penalties._penalties_kernel": sampling.penalties,
    _AT + "sample.logit_bias._bias_kernel": sampling.logit_bias,
    _AT + "sample.bad_words._bad_words_kernel": sampling.bad_words,
    _AT + "sample.thinking_budget._update_committed_marker_cache_kernel": sampling.find_markers,
    _AT + "sample.thinking_budget._thinking_budget_kernel": sampling.thinking_budget,
    _AT + "sample.logprob._topk_log_softmax_kernel": sampling.token_logprobs,
    _AT + "sample.logprob._ranks_kernel": sampling.ranks,
    _AT + "structured_outputs._apply_grammar_bitmask_kernel": sampling.grammar_bitmask,
    _AT + "spec_decode.rejection_sampler._flatten_sampled_kernel": batches.flatten_sampled,
    _AT + "spec_decode.rejection_sampler._gather_draft_sampled_kernel": batches.gather_drafts,
    _AT + "input_batch._prepare_prefill_inputs_kernel": batches.prefill_inputs,
    _AT + "input_batch._prepare_pos_seq_lens_kernel": batches.positions_and_lengths,
    _AT + "input_batch._combine_sampled_and_draft_tokens_kernel": batches.combine_drafts,
    _AT + "input_batch._get_num_sampled_and_rejected_kernel": batches.sampled_and_rejected,
    _AT + "input_batch._post_update_kernel": batches.post_update,
    _AT + "input_batch._expand_idx_mapping_kernel": batches.expand_slots,
    _AT + "buffer_utils._apply_write_kernel": batches.apply_write,
}
"""Kernel of Model Runner V2 → what runs in its place."""
