"""Tiny model configs of the families that people serve, one entry per family."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

VOCAB = 32


@dataclass(frozen=True)
class Family:
    """A model that random weights are drawn for.

    mix: size of what layers add to the residual stream; less makes texts repeat themselves.
    """

    config: dict[str, Any]
    engine: dict[str, Any] = field(default_factory=dict)
    mix: float = 1.0


ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
# Read by nearly every model class; the others ignore what they do not know.
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "float32",
    "rope_parameters": ROPE,
}


def family(
    architecture: str,
    model_type: str,
    *groups: dict[str, Any],
    without: tuple[str, ...] = (),
    engine: dict[str, Any] | None = None,
    mix: float = 1.0,
    **keys: Any,
) -> Family:
    """A family whose config is `BASE` less the keys `without`, then `groups`, then `keys`."""
    config = {key: value for key, value in BASE.items() if key not in without}
    config |= {"architectures": [architecture], "model_type": model_type}
    for group in groups:
        config |= group
    return Family(config | keys, engine or {}, mix)


def around(text: Family, architecture: str, model_type: str, **keys: Any) -> Family:
    """A multimodal checkpoint around a text model, served for text alone."""
    inner = {key: value for key, value in text.config.items() if key != "architectures"}
    config = {"architectures": [architecture], "model_type": model_type, "torch_dtype": "float32"}
    engine = {**text.engine, "language_model_only": True}
    return Family(config | {"text_config": inner} | keys, engine, text.mix)


# fmt: off
# ---- groups of keys ----
YARN = {
    "rope_theta": 10000.0, "rope_type": "yarn", "factor": 2.0, "beta_fast": 32.0,
    "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 256}
HALF_ROPE = {"partial_rotary_factor": 0.5,
             "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}
MROPE = {"rope_parameters": {**ROPE, "mrope_section": [8, 4, 4], "mrope_interleaved": True}}
SLIDING, FULL = "sliding_attention", "full_attention"
WINDOWS = {"sliding_window": 32, "num_hidden_layers": 4,
           "layer_types": [SLIDING, SLIDING, SLIDING, FULL]}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
           "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
ROUTED = {**EXPERTS, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
          "routed_scaling_factor": 1.0, "n_shared_experts": 1, "num_shared_experts": 1}
NOAUX = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
GEMMA = {"tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh",
         "query_pre_attn_scalar": 32}
ROPE_BY_LAYER = {"rope_parameters": {SLIDING: ROPE, FULL: {**ROPE, "rope_theta": 1e6}}}
GEMMA_4 = {**GEMMA, **WINDOWS, "final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 0,
           "rope_parameters": {SLIDING: ROPE, FULL: {"rope_type": "proportional",
                               "rope_theta": 1e6, "partial_rotary_factor": 0.25}}}
MLA = {"kv_lora_rank": 512, "q_lora_rank": 48, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32,
       "v_head_dim": 32, "num_key_value_heads": 4, "moe_layer_freq": 1,
       "num_nextn_predict_layers": 0, **ROUTED, **NOAUX}
SPARSE_MLA = {**MLA, "index_topk": 64, "index_head_dim": 32, "index_n_heads": 2}
GRANITE = {"attention_multiplier": 0.2, "embedding_multiplier": 1.0, "logits_scaling": 1.0,
           "residual_multiplier": 1.0}
MAMBA = {"mamba_n_heads": 8, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_head": 32,
         "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 32}
DELTA_NET = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
             "linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_hidden_layers": 6,
             "layer_types": (["linear_attention"] * 2 + [FULL]) * 2,
             "full_attention_interval": 3, "partial_rotary_factor": 0.5,
             "rope_parameters": {**ROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True,
                                 "partial_rotary_factor": 0.5}}
QWEN_MOE = {**EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": [],
            "shared_expert_intermediate_size": 64}
LLAMA_4 = {**EXPERTS, "num_experts_per_tok": 1, "num_hidden_layers": 4,
           "intermediate_size_mlp": 192, "interleave_moe_layer_step": 1,
           "no_rope_layer_interval": 4}
MIMO_V2 = {**ROUTED, **NOAUX, "v_head_dim": 32, "sliding_window": 32, "sliding_window_size": 32,
           "hybrid_layer_pattern": [0, 1, 1], "moe_layer_freq": [0, 1, 1], "swa_head_dim": 32,
           "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_v_head_dim": 32,
           "swa_rope_theta": 10000.0, "rope_theta": 10000.0, "partial_rotary_factor": 1.0,
           "layernorm_epsilon": 1e-5, "attention_value_scale": 0.7,
           "add_full_attention_sink_bias": False, "add_swa_attention_sink_bias": False}
MAMBA_LAYERS = ["mamba", "attention", "mamba", "mamba", "attention"]
# vLLM computes the block size of models with recurrent layers.
hybrid = partial(family, engine={"block_size": None}, mix=0.2)

FAMILIES = {
    # ---- dense, full attention ----
    "Llama": family("LlamaForCausalLM", "llama"),
    "Arcee": family("ArceeForCausalLM", "arcee", hidden_act="relu2", mlp_bias=False),
    "Apertus": family("ApertusForCausalLM", "apertus", hidden_act="xielu", post_norm=False,
        qk_norm=True),
    "ChatGLM 3, GLM-4 9B": family("ChatGLMModel", "chatglm", without=("num_hidden_layers",),
        num_layers=3, ffn_hidden_size=192, kv_channels=32, multi_query_attention=True,
        multi_query_group_num=2, padded_vocab_size=VOCAB, layernorm_epsilon=1e-5, rmsnorm=True,
        add_qkv_bias=True, add_bias_linear=False, post_layer_norm=True, seq_length=512,
        apply_residual_connection_post_layernorm=False, original_rope=True),
    "Command-R": family("CohereForCausalLM", "cohere", logit_scale=1.0, use_qk_norm=True),
    "ERNIE 4.5": family("Ernie4_5ForCausalLM", "ernie4_5", use_bias=False),
    "EXAONE 3": family("ExaoneForCausalLM", "exaone", activation_function="silu", num_layers=3),
    "Falcon": family("FalconForCausalLM", "falcon", without=("num_key_value_heads", "head_dim"),
        alibi=False, multi_query=True, new_decoder_architecture=False, parallel_attn=True,
        bias=False),
    "GLM-4": family("Glm4ForCausalLM", "glm4", HALF_ROPE),
    "GPT-2": family("GPT2LMHeadModel", "gpt2", n_embd=128, n_layer=3, n_head=4, n_positions=512,
        n_inner=256, activation_function="gelu_new"),
    "GPT-J": family("GPTJForCausalLM", "gptj", n_embd=128, n_layer=3, n_head=4, n_positions=512,
        n_inner=256, rotary_dim=16, activation_function="gelu_new"),
    "Gemma": family("GemmaForCausalLM", "gemma", GEMMA, hidden_act="gelu_pytorch_tanh"),
    "Granite 3": family("GraniteForCausalLM", "granite", GRANITE),
    "HyperCLOVA X": family("HyperCLOVAXForCausalLM", "hyperclovax", GRANITE, mlp_bias=False,
        use_post_norm=True),
    "InternLM 2": family("InternLM2ForCausalLM", "internlm2", bias=False),
    "InternLM 3": family("InternLM3ForCausalLM", "internlm3", qkv_bias=False),
    "IQuest Coder": family("IQuestCoderForCausalLM", "iquestcoder"),
    "MiMo": family("MiMoForCausalLM", "mimo", num_nextn_predict_layers=0),
    "MiniCPM": family("MiniCPMForCausalLM", "minicpm", scale_emb=1, scale_depth=1.4,
        dim_model_base=128),
    "MiniCPM 3": family("MiniCPM3ForCausalLM", "minicpm3", without=("head_dim",), q_lora_rank=48,
        kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=32, scale_emb=1,
        scale_depth=1.4, dim_model_base=128, num_key_value_heads=4),
    "Ministral 3": family("Ministral3ForCausalLM", "ministral3", sliding_window=None,
        rope_parameters={**YARN, "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0},
        llama_4_scaling={"original_max_position_embeddings": 16, "beta": 0.3}),
    "Mistral": family("MistralForCausalLM", "mistral", sliding_window=None),
    "Nemotron 4": family("NemotronForCausalLM", "nemotron", partial_rotary_factor=0.5,
        hidden_act="relu2", mlp_bias=False),
    "OPT": family("OPTForCausalLM", "opt", ffn_dim=192, do_layer_norm_before=True, enable_bias=True,
        word_embed_proj_dim=128, layer_norm_elementwise_affine=True, activation_function="relu",
        _remove_final_layer_norm=False),
    "Orion": family("OrionForCausalLM", "orion"),
    "openPangu Embedded": family("PanguEmbeddedForCausalLM", "pangu_embedded", bias=True,
        rope_theta=10000.0),
    "Phi-3 and 4": family("Phi3ForCausalLM", "phi3", sliding_window=None,
        original_max_position_embeddings=512),
    "Qwen2": family("Qwen2ForCausalLM", "qwen2", use_sliding_window=False),
    "Qwen3": family("Qwen3ForCausalLM", "qwen3", use_sliding_window=False),
    "Solar": family("SolarForCausalLM", "solar", bskcn_1=[1], bskcn_2=[1], bskcn_3=[2], bskcn_4=[2],
        bskcn_tv=[0.9, 0.8], mlp_bias=False),
    "StableLM": family("StableLmForCausalLM", "stablelm", HALF_ROPE, use_qkv_bias=False,
        use_parallel_residual=False, qk_layernorm=False),
    "TeleChat 2": family("TeleChat2ForCausalLM", "telechat", n_head=4, n_layer=3,
        ffn_hidden_size=192, num_key_value_heads=2),
    "TeleChat 3": family("TeleChat3ForCausalLM", "telechat3"),
    "TeleFLM": family("TeleFLMForCausalLM", "teleflm", use_mup=True, mup_scale_factor=1.0,
        output_mult=1.0, input_mult=1.0),

    # ---- through vLLM's Transformers backend ----
    "Dots 1": family("Dots1ForCausalLM", "dots1", ROUTED, NOAUX, moe_layer_freq=1),
    "FlexOlmo": family("FlexOlmoForCausalLM", "flex_olmo", EXPERTS),
    "GPT-NeoX": family("GPTNeoXForCausalLM", "gpt_neox", hidden_act="gelu"),
    "Hunyuan": family("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", use_qk_norm=True),
    "OLMo": family("OlmoForCausalLM", "olmo"),
    "OLMo 2": family("Olmo2ForCausalLM", "olmo2"),
    "OLMo 3": family("Olmo3ForCausalLM", "olmo3", WINDOWS),
    "Phi-1 and 2": family("PhiForCausalLM", "phi", HALF_ROPE, hidden_act="gelu_new"),
    "Seed-OSS": family("SeedOssForCausalLM", "seed_oss", attention_out_bias=False,
        residual_dropout=0.0),
    "SmolLM3": family("SmolLM3ForCausalLM", "smollm3", no_rope_layers=[1, 1, 0],
        no_rope_layer_interval=3),
    "StarCoder 2": family("Starcoder2ForCausalLM", "starcoder2", use_bias=True,
        hidden_act="gelu_pytorch_tanh", sliding_window=None),

    # ---- sliding windows ----
    "Command-A": family("Cohere2ForCausalLM", "cohere2", WINDOWS, logit_scale=1.0),
    "EXAONE 4": family("Exaone4ForCausalLM", "exaone4", WINDOWS, sliding_window_pattern=4),
    "Gemma 2": family("Gemma2ForCausalLM", "gemma2", GEMMA, WINDOWS, attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0),
    "Gemma 3": family("Gemma3ForCausalLM", "gemma3_text", GEMMA, WINDOWS, ROPE_BY_LAYER),
    "Gemma 4": family("Gemma4ForCausalLM", "gemma4_text", GEMMA_4, global_head_dim=64,
        num_global_key_value_heads=1, attention_k_eq_v=True),
    "Gemma 4 E2B": family("Gemma4ForCausalLM", "gemma4_text", GEMMA_4, global_head_dim=32,
        layer_types=[SLIDING, FULL] * 2, num_kv_shared_layers=2, hidden_size_per_layer_input=32,
        vocab_size_per_layer_input=VOCAB),
    "Gemma 3n": family("Gemma3nForCausalLM", "gemma3n_text", GEMMA, WINDOWS, ROPE_BY_LAYER,
        layer_types=[SLIDING, FULL] * 2, num_kv_shared_layers=2, hidden_size_per_layer_input=32,
        vocab_size_per_layer_input=VOCAB, intermediate_size=[192] * 4, laurel_rank=16,
        activation_sparsity_pattern=[0.0] * 4, altup_num_inputs=2, altup_active_idx=0,
        altup_coef_clip=120.0, altup_correct_scale=True, final_logit_softcapping=30.0),
    "Mistral 7B v0.1": family("MistralForCausalLM", "mistral", sliding_window=32),
    "Muse Glimmer": family("MuseGlimmerForCausalLM", "muse_glimmer_text", WINDOWS,
        hidden_activation="silu"),
    "Plamo 3": family("Plamo3ForCausalLM", "plamo3", num_hidden_layers=4,
        layer_types=["local", FULL] * 2, interleaved_sliding_window=[32, None, 32, None]),
    "Rnj-1": family("Rnj1ForCausalLM", "gemma3_text", GEMMA, WINDOWS, ROPE_BY_LAYER),
    "Step-3.5": family("Step3p5ForCausalLM", "step3p5", num_attention_groups=2, use_moe=False,
        layer_types=[FULL, SLIDING, SLIDING], sliding_window=32, use_head_wise_attn_gate=True,
        attention_other_setting={"attention_type": SLIDING, "num_attention_heads": 6,
            "num_attention_groups": 2, "head_dim": 32, "true_head_dim": 32},
        moe_layers_enum=None, rope_theta=[10000.0] * 3, partial_rotary_factors=[1.0] * 3,
        max_seq_len=512),

    # ---- attention sinks ----
    "gpt-oss": family("GptOssForCausalLM", "gpt_oss", WINDOWS, layer_types=[SLIDING, FULL] * 2,
        num_local_experts=4, num_experts_per_tok=2, head_dim=64, rope_parameters=YARN,
        swiglu_limit=7.0, attention_bias=True),
    "Granite SWA": family("GraniteSWAForCausalLM", "granite_swa", GRANITE, WINDOWS),
    "Granite MoE SWA": family("GraniteMoeSWAForCausalLM", "granitemoe_swa", GRANITE, WINDOWS,
        EXPERTS, shared_intermediate_size=64),
    "Laguna": family("LagunaForCausalLM", "laguna", EXPERTS, WINDOWS, ROPE_BY_LAYER,
        shared_expert_intermediate_size=64, gating=True, mlp_layer_types=["dense"] * 4,
        num_attention_heads_per_layer=[4, 6, 6, 4]),
    "MiMo-V2 with sinks": family("MiMoV2FlashForCausalLM", "mimo_v2_flash", MIMO_V2, head_dim=64,
        swa_head_dim=64, partial_rotary_factor=0.5, add_swa_attention_sink_bias=True),

    # ---- mixtures of experts ----
    "AFMoE (Trinity)": family("AfmoeForCausalLM", "afmoe", ROUTED, WINDOWS, num_dense_layers=1,
        mup_enabled=True, score_func="sigmoid", route_norm=True, route_scale=1.0),
    "Bailing MoE (Ling)": family("BailingMoeForCausalLM", "bailing_moe", ROUTED, use_bias=False,
        use_qkv_bias=False, embedding_dropout=0.0),
    "Bailing MoE V2 (Ling 2)": family("BailingMoeV2ForCausalLM", "bailing_moe", ROUTED,
        use_bias=False, use_qkv_bias=False, embedding_dropout=0.0, score_function="sigmoid",
        use_qk_norm=True, moe_router_enable_expert_bias=True),
    "Command-A MoE": family("Cohere2MoeForCausalLM", "cohere2_moe", ROUTED, WINDOWS,
        logit_scale=1.0, expert_selection_fn="sigmoid",
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"]),
    "DBRX": family("DbrxForCausalLM", "dbrx", d_model=128, n_heads=4, n_layers=3, max_seq_len=512,
        ffn_config={"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2,
                    "ffn_act_fn": {"name": "silu"}},
        attn_config={"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0}),
    "DeepSeek MoE": family("DeepseekForCausalLM", "deepseek", ROUTED, moe_layer_freq=1),
    "ERNIE 4.5 MoE": family("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", use_bias=False, moe_k=2,
        moe_num_experts=4, moe_intermediate_size=64, moe_num_shared_experts=1,
        moe_layer_start_index=1, moe_layer_end_index=2, moe_layer_interval=1),
    "EXAONE MoE": family("ExaoneMoEForCausalLM", "exaone_moe", ROUTED, WINDOWS,
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"], scoring_func="sigmoid"),
    "GLM-4.5 to 4.7": family("Glm4MoeForCausalLM", "glm4_moe", ROUTED, HALF_ROPE, use_qk_norm=True),
    "Granite MoE": family("GraniteMoeForCausalLM", "granitemoe", GRANITE, EXPERTS),
    "Granite MoE, shared experts": family("GraniteMoeSharedForCausalLM", "granitemoeshared",
        GRANITE, EXPERTS, shared_intermediate_size=64),
    "Granite 4 micro": family("GraniteMoeHybridForCausalLM", "granitemoehybrid", GRANITE, MAMBA,
        layer_types=["attention"] * 3, layers_block_type=["attention"] * 3, num_local_experts=0,
        num_experts_per_tok=0, shared_intermediate_size=192, position_embedding_type="rope"),
    "HY 3": family("HYV3ForCausalLM", "hy_v3", ROUTED, expert_hidden_dim=64, qk_norm=True,
        enable_attention_fp32_softmax=False, enable_lm_head_fp32=False, route_norm=True,
        router_scaling_factor=1.0, moe_router_use_sigmoid=False,
        mlp_layer_types=["dense", "sparse", "sparse"]),
    "Llama 4, full attention": family("Llama4ForCausalLM", "llama4_text", LLAMA_4,
        attention_chunk_size=None, layer_types=[FULL] * 4, floor_scale=16),
    "MiMo-V2": family("MiMoV2FlashForCausalLM", "mimo_v2_flash", MIMO_V2),
    "MiniMax M2": family("MiniMaxM2ForCausalLM", "minimax_m2", EXPERTS, rotary_dim=16,
        qk_norm_type="per_layer", use_qk_norm=True, use_routing_bias=False, scoring_func="softmax"),
    "Mixtral": family("MixtralForCausalLM", "mixtral", EXPERTS, sliding_window=None),
    "OLMoE": family("OlmoeForCausalLM", "olmoe", EXPERTS),
    "openPangu Pro MoE": family("PanguProMoEV2ForCausalLM", "PanguProMoE", ROUTED,
        rope_theta=10000.0, sandwich_norm=True),
    "Param 2 MoE": family("Param2MoEForCausalLM", "param2moe", ROUTED, score_function="sigmoid",
        rope_theta=10000.0, rope_scaling=None, moe_shared_expert_intermediate_size=64),
    "PhiMoE": family("PhiMoEForCausalLM", "phimoe", EXPERTS, lm_head_bias=True,
        sliding_window=None),
    "Qwen2 MoE": family("Qwen2MoeForCausalLM", "qwen2_moe", QWEN_MOE),
    "Qwen3 MoE": family("Qwen3MoeForCausalLM", "qwen3_moe", QWEN_MOE),
    "Sarvam MoE": family("SarvamMoEForCausalLM", "sarvam_moe", ROUTED, use_bias=False,
        use_qkv_bias=False, embedding_dropout=0.0,
        moe_shared_expert_intermediate_size=64, score_function="sigmoid",
        moe_router_enable_expert_bias=True),
    "Step-3": family("Step3TextForCausalLM", "step3_text", num_attention_groups=1, share_q_dim=128,
        max_seq_len=512, moe_layers_enum=None, rope_theta=10000.0, moe_num_experts=4, moe_top_k=2,
        moe_intermediate_size=64, share_expert_dim=64),

    # ---- latent attention (MLA) ----
    "DeepSeek V2": family("DeepseekV2ForCausalLM", "deepseek_v2", MLA, without=("head_dim",),
        scoring_func="softmax", topk_method="greedy", n_group=None, topk_group=None),
    "DeepSeek V3, Kimi K2": family("DeepseekV3ForCausalLM", "deepseek_v3", MLA,
        without=("head_dim",)),
    "DeepSeek V3.2": family("DeepseekV32ForCausalLM", "deepseek_v32", SPARSE_MLA,
        without=("head_dim",)),
    "GLM-4.7 Flash": family("Glm4MoeLiteForCausalLM", "glm4_moe_lite", MLA, without=("head_dim",)),
    "GLM-5": family("GlmMoeDsaForCausalLM", "glm_moe_dsa", SPARSE_MLA, without=("head_dim",)),
    "LongCat Flash": family("LongcatFlashForCausalLM", "longcat_flash", MLA, num_layers=2,
        without=("head_dim",), ffn_hidden_size=192, expert_ffn_hidden_size=64, moe_topk=2,
        zero_expert_num=1, zero_expert_type="identity", mla_scale_q_lora=True,
        mla_scale_kv_lora=True),
    "openPangu Ultra MoE": family("PanguUltraMoEForCausalLM", "pangu_ultra_moe", MLA,
        without=("head_dim",)),

    # ---- recurrent layers ----
    "Bamba": hybrid("BambaForCausalLM", "bamba", MAMBA, num_hidden_layers=4,
        attn_layer_indices=[2]),
    "Falcon-H1": hybrid("FalconH1ForCausalLM", "falcon_h1", MAMBA, mamba_d_ssm=256,
        mlp_multipliers=[1.0, 1.0], ssm_multipliers=[1.0] * 5),
    "Granite 4 hybrid": hybrid("GraniteMoeHybridForCausalLM", "granitemoehybrid", GRANITE, MAMBA,
        num_hidden_layers=5, layer_types=MAMBA_LAYERS, layers_block_type=MAMBA_LAYERS,
        num_local_experts=0, num_experts_per_tok=0,
        shared_intermediate_size=192, position_embedding_type="rope"),
    "Jamba": hybrid("JambaForCausalLM", "jamba", MAMBA, EXPERTS, num_hidden_layers=4,
        attn_layer_period=4, attn_layer_offset=2, expert_layer_period=2, expert_layer_offset=1,
        mamba_dt_rank=8),
    "Kimi Linear": hybrid("KimiLinearForCausalLM", "kimi_linear", MLA, without=("head_dim",),
        num_hidden_layers=4, num_experts_per_token=2, moe_router_activation_func="sigmoid",
        linear_attn_config={"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 4,
                            "head_dim": 32, "short_conv_kernel_size": 4}),
    "LFM2": hybrid("Lfm2ForCausalLM", "lfm2", mix=0.04, num_hidden_layers=5,
        layer_types=["conv", FULL, "conv", "conv", FULL], block_dim=128, conv_dim=128,
        conv_dim_out=128, conv_L_cache=3, conv_bias=False, block_multiple_of=32, block_ff_dim=192,
        block_use_swiglu=True, tie_word_embeddings=True),
    "Mamba 2": hybrid("Mamba2ForCausalLM", "mamba2", intermediate_size=256,
        num_heads=8, state_size=16, n_groups=1, expand=2, conv_kernel=4, chunk_size=32),
    "Nemotron-H, Nemotron 3": hybrid("NemotronHForCausalLM", "nemotron_h",
        without=("num_hidden_layers",), hybrid_override_pattern="M-*M-M*",
        layers_block_type=["mamba", "mlp", "attention", "mamba", "mlp", "mamba", "attention"],
        ssm_state_size=16, mamba_num_heads=8, mamba_head_dim=32, n_groups=2, conv_kernel=4,
        chunk_size=32, mlp_hidden_act="relu2"),
    "Qwen3-Next": hybrid("Qwen3NextForCausalLM", "qwen3_next", QWEN_MOE, DELTA_NET,
        rope_parameters=ROPE),
    "Qwen3.5": hybrid("Qwen3_5ForCausalLM", "qwen3_5_text", DELTA_NET),
    "Qwen3.5 MoE": hybrid("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", QWEN_MOE, DELTA_NET),
    "Zamba 2": hybrid("Zamba2ForCausalLM", "zamba2", MAMBA, hidden_act="gelu",
        num_hidden_layers=4,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"], mamba_ngroups=1, n_mamba_heads=8,
        mamba_headdim=32, num_mem_blocks=1, attention_head_dim=64, attention_hidden_size=256,
        use_shared_attention_adapter=False, adapter_rank=8, use_mem_rope=True, chunk_size=32),

    # ---- other attention ----
    "Bloom": family("BloomForCausalLM", "bloom", n_layer=3, n_head=4),
    "Falcon with ALiBi": family("FalconForCausalLM", "falcon", alibi=True, multi_query=True,
        without=("num_key_value_heads", "head_dim"), new_decoder_architecture=False,
        parallel_attn=False, bias=True),
    "HRM text": family("HrmTextForCausalLM", "hrm_text"),
    "IQuest Loop Coder": family("IQuestLoopCoderForCausalLM", "iquestloopcoder", loop_num=2,
        loop_window_size=16),
    "Llama 4": family("Llama4ForCausalLM", "llama4_text", LLAMA_4, attention_chunk_size=64),
    "MiniMax M3": family("MiniMaxM3SparseForCausalLM", "minimax_m3_text", ROUTED, NOAUX,
        rope_theta=10000.0, partial_rotary_factor=0.5, use_gemma_norm=True, qk_norm_type="per_head",
        hidden_act="swigluoai", swiglu_limit=7.0, swiglu_alpha=1.7, swiglu_beta=1.0,
        dense_intermediate_size=192, shared_intermediate_size=64, moe_layer_freq=[0, 1, 1]),
    "Qwen2 with dual chunks": family("Qwen2ForCausalLM", "qwen2", use_sliding_window=False,
        dual_chunk_attention_config={"chunk_size": 64, "local_size": 32,
                                     "original_max_position_embeddings": 128}),
    "Step-1": family("Step1ForCausalLM", "step1"),
}

# ---- multimodal checkpoints, served for text alone ----
QWEN_TOKENS = {"image_token_id": 20, "video_token_id": 21, "vision_start_token_id": 22,
               "vision_end_token_id": 23}
VISION = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
          "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
QWEN_VISION = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2,
               "in_channels": 3, "patch_size": 16, "spatial_merge_size": 2,
               "temporal_patch_size": 2, "out_hidden_size": 128, "num_position_embeddings": 64,
               "deepstack_visual_indexes": [0]}
FAMILIES |= {
    "Gemma 3 checkpoint": around(FAMILIES["Gemma 3"], "Gemma3ForConditionalGeneration", "gemma3",
        vision_config={**VISION, "model_type": "siglip_vision_model"}, mm_tokens_per_image=4,
        image_token_index=20, boi_token_index=21, eoi_token_index=22),
    "Gemma 4 checkpoint": around(FAMILIES["Gemma 4 E2B"],
        "Gemma4ForConditionalGeneration", "gemma4",
        image_token_id=20, boi_token_id=21, eoi_token_id=22,
        vision_config={**VISION, "model_type": "gemma4_vision", "num_key_value_heads": 2,
                       "head_dim": 32, "position_embedding_size": 64}),
    "Llama 4 checkpoint": around(FAMILIES["Llama 4"], "Llama4ForConditionalGeneration", "llama4",
        vision_config={**VISION, "vision_output_dim": 64, "projector_input_dim": 64,
                       "projector_output_dim": 64}),
    "Mistral Small 3": around(FAMILIES["Mistral"], "Mistral3ForConditionalGeneration", "mistral3",
        vision_config={**VISION, "model_type": "pixtral", "head_dim": 32}, image_token_index=20,
        spatial_merge_size=2, projector_hidden_act="gelu", multimodal_projector_bias=False,
        vision_feature_layer=-1),
    "Qwen2.5-VL": around(family("Qwen2ForCausalLM", "qwen2_5_vl_text", MROPE),
        "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", **QWEN_TOKENS,
        vision_config={**QWEN_VISION, "window_size": 32, "fullatt_block_indexes": [0],
                       "hidden_act": "silu"}),
    "Qwen3-VL": around(family("Qwen3ForCausalLM", "qwen3_vl_text", MROPE),
        "Qwen3VLForConditionalGeneration", "qwen3_vl", **QWEN_TOKENS,
        vision_config=QWEN_VISION),
    "Qwen3.5 checkpoint": around(FAMILIES["Qwen3.5"], "Qwen3_5ForConditionalGeneration", "qwen3_5",
        **QWEN_TOKENS, vision_config=QWEN_VISION),
}
# fmt: on
