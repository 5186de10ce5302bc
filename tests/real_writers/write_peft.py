"""Adapters of every type that peft knows, and the logits of the LM with the adapter unmerged."""

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
import transformers as hf
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from written_lms import ROWS, last_logits, make_lm, perturb, save_logits, save_tokenizer

FOLDER = Path(sys.argv[1])
BASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "bfloat16": {},
    "tied": {"tie_word_embeddings": True},
    "gpt2": {"model_type": "gpt2"},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4},
}
LINEAR = ["q_proj", "v_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def lora(targets: Any = LINEAR, **options: Any) -> Any:
    return peft.LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": targets} | options)


def linear(kind: Any, targets: Any = LINEAR, **options: Any) -> Callable[[], Any]:
    return lambda: kind(target_modules=targets, **options)


def prompt(kind: Any, **options: Any) -> Callable[[], Any]:
    return lambda: kind(task_type="CAUSAL_LM", **options)


GPT2 = ["c_attn", "c_fc", "c_proj"]
# name -> (base, config)
CASES: dict[str, tuple[str, Callable[[], Any]]] = {
    "adalora": ("llama", linear(peft.AdaLoraConfig, init_r=4, target_r=2, total_step=9)),
    "adamss": ("llama", linear(peft.AdamssConfig, r=16, num_subspaces=2)),
    "beft": ("biases", linear(peft.BeftConfig, ["q_proj", "v_proj"])),
    "boft": ("llama", linear(peft.BOFTConfig, boft_block_size=8)),
    "boft-butterfly": (
        "llama",
        linear(peft.BOFTConfig, boft_block_size=4, boft_n_butterfly_factor=2),
    ),
    "c3a": ("llama", linear(peft.C3AConfig, block_size=32)),
    "deft": ("llama", linear(peft.DeftConfig)),
    "deft-qr": ("llama", linear(peft.DeftConfig, decomposition_method="qr")),
    "delora": ("llama", linear(peft.DeloraConfig)),
    "fourierft": ("llama", linear(peft.FourierFTConfig, n_frequency=40)),
    "frod": ("llama", linear(peft.FrodConfig, progressbar=False)),
    "glora": ("llama", linear(peft.GloraConfig)),
    "gralora": ("llama", linear(peft.GraloraConfig, r=8)),
    "gralora-hybrid": ("llama", linear(peft.GraloraConfig, r=8, hybrid_r=4)),
    "hira": ("llama", linear(peft.HiraConfig, r=4)),
    "hra": ("llama", linear(peft.HRAConfig)),
    "ia3": ("llama", linear(peft.IA3Config, feedforward_modules=["down_proj"])),
    "ia3-gpt2": (
        "gpt2",
        linear(peft.IA3Config, GPT2, feedforward_modules=["c_fc"], fan_in_fan_out=True),
    ),
    "ln-tuning": ("llama", linear(peft.LNTuningConfig, ["input_layernorm", "norm"])),
    "ln-tuning-gpt2": ("gpt2", linear(peft.LNTuningConfig, ["ln_1", "ln_f"])),
    "loha": ("llama", linear(peft.LoHaConfig)),
    "lokr": ("llama", linear(peft.LoKrConfig, decompose_both=True)),
    "lora": ("llama", lora),
    "lora-bdlora": (
        "llama",
        lambda: lora(use_bdlora=peft.tuners.lora.config.BdLoraConfig(LINEAR[:2], LINEAR[2:], 2)),
    ),
    "lora-bias": ("biases", lambda: lora(bias="all")),
    "lora-bias-of-lora": ("biases", lambda: lora(bias="lora_only", lora_bias=True)),
    "lora-dora": ("llama", lambda: lora(use_dora=True)),
    "lora-dora-gpt2": ("gpt2", lambda: lora(GPT2, use_dora=True, fan_in_fan_out=True)),
    "lora-embedding-tied": ("tied", lambda: lora(["q_proj", "embed_tokens"])),
    "lora-every-linear": ("llama", lambda: lora("all-linear")),
    "lora-gaussian": ("llama", lambda: lora(init_lora_weights="gaussian")),
    "lora-gpt2": ("gpt2", lambda: lora(GPT2, fan_in_fan_out=True)),
    "lora-head": ("llama", lambda: lora(["q_proj", "lm_head"])),
    "lora-head-tied": ("tied", lambda: lora(["q_proj", "lm_head"])),
    "lora-kasa": ("llama", lambda: lora(kasa_config=peft.tuners.lora.config.KasaConfig())),
    "lora-layers": ("llama", lambda: lora(layers_to_transform=[1], exclude_modules=["v_proj"])),
    "lora-mica": ("llama", lambda: lora(init_lora_weights="mica")),
    "lora-monteclora": (
        "llama",
        lambda: lora(monteclora_config=peft.tuners.lora.config.MontecloraConfig()),
    ),
    "lora-olora": ("llama", lambda: lora(init_lora_weights="olora")),
    "lora-orthogonal": ("llama", lambda: lora(init_lora_weights="orthogonal")),
    "lora-parameters": ("mixtral", lambda: lora([], target_parameters=EXPERTS)),
    "lora-parameters-linear": ("mixtral", lambda: lora(["q_proj"], target_parameters=EXPERTS)),
    "lora-patterns": (
        "llama",
        lambda: lora(rank_pattern={"q_proj": 2}, alpha_pattern={"layers.1.*down_proj": 3}),
    ),
    "lora-pissa": ("llama", lambda: lora(init_lora_weights="pissa")),
    "lora-pissa-niter": ("llama", lambda: lora(init_lora_weights="pissa_niter_4")),
    "lora-replicated": ("llama", lambda: lora(layer_replication=[[0, 2], [1, 2]])),
    "lora-rslora": ("llama", lambda: lora(use_rslora=True)),
    "lora-saved": ("llama", lambda: lora(modules_to_save=["lm_head", "norm"])),
    "lora-saved-embedding": ("llama", lambda: lora(modules_to_save=["embed_tokens"])),
    "lora-saved-tied": ("tied", lambda: lora(modules_to_save=["embed_tokens"])),
    "lora-saved-tied-together": (
        "tied",
        lambda: lora(modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    ),
    "lora-tokens": ("llama", lambda: lora(trainable_token_indices=[5, 9])),
    "lora-tokens-tied": ("tied", lambda: lora(trainable_token_indices=[5, 9])),
    "lora-velora": (
        "llama",
        lambda: lora(velora_config=peft.tuners.lora.config.VeloraConfig(num_groups=8)),
    ),
    "miss": ("llama", linear(peft.MissConfig, r=4)),
    "miss-bat": ("llama", linear(peft.MissConfig, r=4, init_weights="bat")),
    "miss-mini": ("llama", linear(peft.MissConfig, r=4, mini_r=2, init_weights="mini")),
    "oft": ("llama", linear(peft.OFTConfig, oft_block_size=8, use_cayley_neumann=False)),
    "oft-neumann": ("llama", linear(peft.OFTConfig, oft_block_size=8, use_cayley_neumann=True)),
    "osf": ("llama", linear(peft.OSFConfig, effective_rank=8)),
    "peanut": ("llama", linear(peft.PeanutConfig, r=4, depth=1)),
    "psoft": ("llama", linear(peft.PsoftConfig, r=8)),
    "pvera": ("llama", linear(peft.PveraConfig, r=8)),
    "randlora": ("llama", linear(peft.RandLoraConfig, r=8)),
    "road": ("llama", linear(peft.RoadConfig, variant="road_2", group_size=8)),
    "shira": ("llama", linear(peft.ShiraConfig, r=4)),
    "supertuning": ("llama", linear(peft.SupertuningConfig, sparsity=0.9)),
    "supertuning-lora": ("llama", linear(peft.SupertuningConfig, sparsity=0.9, r=4)),
    "tinylora": ("llama", linear(peft.TinyLoraConfig, u=8)),
    "trainable-tokens": ("tied", lambda: peft.TrainableTokensConfig(token_indices=[5, 9])),
    "unilora": ("llama", linear(peft.UniLoraConfig)),
    "vblora": ("llama", linear(peft.VBLoRAConfig, num_vectors=8, vector_length=16)),
    "vblora-topk": (
        "llama",
        linear(peft.VBLoRAConfig, num_vectors=8, vector_length=16, save_only_topk_weights=True),
    ),
    "vera": ("llama", linear(peft.VeraConfig, r=8)),
    "vera-redrawn": ("llama", linear(peft.VeraConfig, r=8, save_projection=False)),
    "waveft": ("llama", linear(peft.WaveFTConfig, n_frequency=40)),
}

# Types that compute something else than weights.
OTHERS: dict[str, tuple[str, Callable[[], Any]]] = {
    "adaption-prompt": (
        "llama",
        prompt(peft.AdaptionPromptConfig, adapter_len=2, adapter_layers=1),
    ),
    "cartridge": ("llama", prompt(peft.CartridgeConfig, num_virtual_tokens=3)),
    "cpt": (
        "llama",
        prompt(
            peft.CPTConfig,
            cpt_token_ids=[3, 4],
            cpt_mask=[1, 1],
            cpt_tokens_type_mask=[1, 2],
        ),
    ),
    "lily": ("llama", linear(peft.LilyConfig, r=4)),
    "lora-alora": ("llama", lambda: lora(alora_invocation_tokens=[5, 6], task_type="CAUSAL_LM")),
    "multitask-prompt-tuning": (
        "llama",
        prompt(peft.MultitaskPromptTuningConfig, num_virtual_tokens=3, num_tasks=2),
    ),
    "p-tuning": ("llama", prompt(peft.PromptEncoderConfig, num_virtual_tokens=3)),
    "poly": ("llama", linear(peft.PolyConfig, r=4, n_tasks=2)),
    "prefix-tuning": ("llama", prompt(peft.PrefixTuningConfig, num_virtual_tokens=3)),
    "prompt-tuning": ("llama", prompt(peft.PromptTuningConfig, num_virtual_tokens=3)),
    "shadow": ("llama", linear(peft.ShadowConfig, None, r=4)),
}


def base(name: str) -> Any:
    return hf.AutoModelForCausalLM.from_pretrained(FOLDER / "bases" / name).eval()


def save(name: str, adapted: Any, before: Any, folder: Path | None = None, **options: Any) -> None:
    """Save an adapter, and the logits of its LM with it, and before it."""
    adapted.eval()
    adapted.save_pretrained(folder or FOLDER / name, **options)
    save_logits(FOLDER / f"{name}.npz", adapted, before=before)


def write_type(name: str) -> None:
    base_name, config = CASES.get(name) or OTHERS[name]
    model = base(base_name)
    before = last_logits(model)
    adapted = perturb(peft.get_peft_model(model, config()), 0.1, seed=1)
    if name in CASES:
        save(name, adapted, before)
    else:
        adapted.save_pretrained(FOLDER / name)


def write_started_by_data() -> None:
    """EVA's start is by texts, X-LoRA and Arrow are made of adapters; conversion of PiSSA."""
    model = base("llama")
    before = last_logits(model)
    adapted = peft.get_peft_model(model, lora(init_lora_weights="eva"))
    ids = torch.tensor([ROWS[2], ROWS[2][::-1]])  # the start takes as many tokens as it needs
    texts = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}] * 4
    peft.initialize_lora_eva_weights(adapted, texts)
    save("lora-eva", perturb(adapted, 0.1, seed=1), before)

    for start in ("pissa_niter_4", "olora"):
        name = f"lora-{start.split('_')[0]}-converted"
        adapted = peft.get_peft_model(base("llama"), lora(init_lora_weights=start))
        adapted.save_pretrained(FOLDER / f"{name}-start")
        perturb(adapted, 0.1, seed=1)
        at_start = str(FOLDER / f"{name}-start")
        save(name, adapted, before, path_initial_model_for_weight_conversion=at_start)

    adapters = {str(i): str(FOLDER / name) for i, name in enumerate(("lora", "lora-rslora"))}
    model = base("llama")
    model.config.use_cache = False
    options = {"hidden_size": 64, "xlora_depth": 1, "adapters": adapters}
    mixed = peft.get_peft_model(model, peft.XLoraConfig(task_type="CAUSAL_LM", **options))
    perturb(mixed, 0.1, seed=1).save_pretrained(FOLDER / "xlora")
    arrow = peft.tuners.lora.config.ArrowConfig(top_k=1)
    routed = peft.create_arrow_model(base("llama"), list(adapters.values()), arrow)
    routed.save_pretrained(FOLDER / "arrow")


def write_several() -> None:
    """Several adapters in one LM: the active one counts, each lies in a folder of its name."""
    model = base("llama")
    before = last_logits(model)
    adapted = peft.get_peft_model(model, lora(), adapter_name="first")
    adapted.add_adapter("second", lora(["k_proj", "down_proj"], r=3))
    for name in ("first", "second"):
        adapted.set_adapter(name)
        perturb(adapted, 0.2, seed=len(name))
    adapted.add_weighted_adapter(["first", "second"], [0.5, 2.0], "mixed", combination_type="cat")
    for name in ("first", "second", "mixed"):
        adapted.set_adapter(name)
        save(f"several-{name}", adapted, before, FOLDER / "several")

    # Beside others in one LM, merged and saved as a whole.
    adapted.set_adapter("second")
    save_logits(FOLDER / "merged.npz", adapted, before=before)
    adapted.merge_and_unload().save_pretrained(FOLDER / "merged")
    save_tokenizer(FOLDER / "merged")

    # Over half precision, an adapter is in float32.
    model = base("bfloat16")
    before = last_logits(model)
    adapted = peft.get_peft_model(model, lora())
    save("lora-bfloat16", perturb(adapted, 0.1, seed=1).float(), before)


def main() -> None:
    for name, options in BASES.items():
        model = make_lm(**options)
        if name == "bfloat16":
            model.to(torch.bfloat16)
        model.save_pretrained(FOLDER / "bases" / name)
        save_tokenizer(FOLDER / "bases" / name)
    for name in CASES | OTHERS:
        write_type(name)
    write_started_by_data()
    write_several()
    configs = (json.loads(path.read_text()) for path in FOLDER.glob("*/adapter_config.json"))
    types = {config["peft_type"] for config in configs}
    assert types == set(PEFT_TYPE_TO_CONFIG_MAPPING)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
