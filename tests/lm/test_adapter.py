"""Adapters as LMs: the merged LM against peft's own forward, one prompt at a time."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from lincorr_lightning.ablation.token_embedding import read_token_embedding
from lincorr_lightning.errors import LanguageModelError
from lincorr_lightning.finetune.adapters import save_merged
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.language_model import LanguageModel
from tests.lm.small_lms import (
    PROMPTS,
    TOKEN_IDS,
    VOCAB,
    Folder,
    naive_logits,
    small_tokenizer,
    word_ids,
)
from tests.toys import save_toy_gguf

pytestmark = pytest.mark.filterwarnings("ignore:.*(tie|gradient_checkpointing|vera)")

WEIGHTS = "adapter_model.safetensors"
EVERY = "all-linear"
EMBEDDING = ["embed_tokens", "lm_head"]


def lora(targets: Any = EVERY, **options: Any) -> peft.LoraConfig:
    return peft.LoraConfig(r=2, lora_alpha=6, target_modules=targets, **options)


KINDS: dict[str, Callable[[], peft.PeftConfig]] = {
    "lora": lora,
    "dora": lambda: lora(use_dora=True),
    "rslora": lambda: lora(use_rslora=True),
    "pissa": lambda: lora(["q_proj"], init_lora_weights="pissa"),
    "bias": lambda: lora(["q_proj"], bias="all"),
    "head": lambda: lora(["q_proj", "lm_head"]),
    "embedding": lambda: lora(["q_proj", "embed_tokens"]),
    "embedding saved": lambda: lora(["q_proj"], modules_to_save=["embed_tokens", "norm"]),
    "head saved": lambda: lora(["q_proj"], modules_to_save=["lm_head"]),
    "tokens": lambda: lora(["q_proj"], trainable_token_indices=[5, 6]),
    "ia3": lambda: peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "vera": lambda: peft.VeraConfig(target_modules=["q_proj"]),
    "adalora": lambda: peft.AdaLoraConfig(target_modules=["q_proj"], total_step=9),
}


def train(base: Path, folder: Path, config: peft.PeftConfig, n_tokens: int | None = None) -> Any:
    """Return an LM with an adapter whose weights are random, in peft's wrapper; save it."""
    model = hf.AutoModelForCausalLM.from_pretrained(base)
    if n_tokens is not None:
        model.resize_token_embeddings(n_tokens)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, config)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += 0.3 * torch.randn_like(parameter)
    adapted.eval().save_pretrained(folder)
    return adapted


def change_settings(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS)


@pytest.fixture
def made(lm_folder: Folder, tmp_path: Path) -> tuple[Path, Any]:
    """Folder of a LoRA adapter, and the LM in peft's wrapper."""
    return tmp_path / "adapter", train(lm_folder("llama"), tmp_path / "adapter", lora())


@pytest.mark.parametrize("base", ["llama", "llama-tied"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_adapter_unmerged(
    kind: str, base: str, lm_folder: Folder, tmp_path: Path
) -> None:
    adapted = train(lm_folder(base), tmp_path / "adapter", KINDS[kind]())
    lm = LanguageModel.from_pretrained(str(tmp_path / "adapter"))
    expected = naive_logits(adapted, PROMPTS, TOKEN_IDS)
    tolerances = {"atol": 1e-3, "rtol": 1e-4}
    torch.testing.assert_close(lm.domain_logits(PROMPTS, TOKEN_IDS), expected, **tolerances)
    before = LanguageModel.from_pretrained(str(lm_folder(base))).domain_logits(PROMPTS, TOKEN_IDS)
    assert (before - expected).abs().max() > 0.3
    # A plain LM: it saves, and is itself again.
    assert not any("peft" in type(part).__module__ for part in lm.model.modules())
    save_merged(lm, tmp_path / "saved")
    assert not (tmp_path / "saved" / "adapter_config.json").exists()
    assert LanguageModel.from_pretrained(str(tmp_path / "saved")).fingerprint == lm.fingerprint


@pytest.mark.parametrize(("scale", "dtype"), [(1.0, torch.bfloat16), (1e-2, torch.float32)])
def test_half_precision_does_not_round_an_adapter_away(
    scale: float, dtype: torch.dtype, lm_folder: Folder, made: tuple[Path, Any]
) -> None:
    folder, adapted = made
    change_weights(folder, lambda weights: {k: scale * w for k, w in weights.items()})
    peft.set_peft_model_state_dict(adapted, load_file(folder / WEIGHTS))
    with adapted.disable_adapter():
        before = naive_logits(adapted, PROMPTS, TOKEN_IDS)
    effect = naive_logits(adapted, PROMPTS, TOKEN_IDS) - before
    lm = LanguageModel.from_pretrained(str(folder), dtype="bfloat16")
    assert lm.model.dtype == dtype
    found = naive_logits(lm.model.float(), PROMPTS, TOKEN_IDS) - before
    assert (found - effect).norm() < 0.2 * effect.norm()


@pytest.mark.parametrize("start", ["pissa_niter_4", "corda", "loftq", "lora_ga"])
def test_adapters_whose_start_cannot_be_repeated(start: str, made: tuple[Path, Any]) -> None:
    change_settings(made[0], init_lora_weights=start)
    with pytest.raises(LanguageModelError, match=f"{start}.*path_initial_model_for_weight"):
        LanguageModel.from_pretrained(str(made[0])).load()


def test_names_and_fingerprint(lm_folder: Folder, made: tuple[Path, Any]) -> None:
    """By its own folder, or beside its base, it is one LM, that of the merged weights."""
    adapter, base = str(made[0]), str(lm_folder("llama"))
    lm = LanguageModel.from_pretrained(adapter)
    info = lm.info
    assert (info["name_or_path"], info["adapter"], info["base"]) == (adapter, adapter, base)
    beside = LanguageModel.from_pretrained(base, adapter=adapter)
    assert beside.info == info | {"name_or_path": base}
    assert beside.fingerprint != LanguageModel.from_pretrained(base).fingerprint
    assert "adapter" not in LanguageModel.from_pretrained(base).info
    merged = made[1].merge_and_unload().state_dict()
    assert all(torch.equal(merged[name], w) for name, w in lm.model.state_dict().items())


def test_random_numbers_of_a_run_stay_the_same(made: tuple[Path, Any]) -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    LanguageModel.from_pretrained(str(made[0]))
    assert torch.equal(torch.rand(3), expected)


def test_base_is_looked_for_here_and_beside_the_adapter(
    lm_folder: Folder, made: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made[0].parent)
    change_settings(made[0], base_model_name_or_path="../base")
    shutil.copytree(lm_folder("llama"), made[0].parent / "base")
    assert LanguageModel.from_pretrained(str(made[0])).info["base"] == f"{made[0]}/../base"
    change_settings(made[0], base_model_name_or_path="base", revision="of the hub")
    assert LanguageModel.from_pretrained("adapter").info["base"] == "base"


def test_types_that_change_no_weights(lm_folder: Folder, tmp_path: Path) -> None:
    """Peft merges them by their registry, and fails: the error names the type, and a way out."""
    train(lm_folder("llama"), tmp_path / "adapter", peft.PolyConfig(target_modules=["q_proj"], r=2))
    with pytest.raises(
        LanguageModelError, match=r"peft_type POLY, .*task_ids.* such as plain LoRA"
    ):
        LanguageModel.from_pretrained(str(tmp_path / "adapter"))


@pytest.mark.parametrize("kind", ["repeated layers", "tokens of the prompt"])
def test_what_peft_merges_into_another_lm_is_refused(
    kind: str, lm_folder: Folder, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"layer_replication": [[0, 2], [1, 2]]}
    if kind == "tokens of the prompt":
        options = {"alora_invocation_tokens": [5, 6], "task_type": "CAUSAL_LM"}
    train(lm_folder("llama"), tmp_path / "adapter", lora(["q_proj"], **options))
    with pytest.raises(LanguageModelError, match="merg"):
        LanguageModel.from_pretrained(str(tmp_path / "adapter"))


def test_no_library_is_imported_by_its_name(made: tuple[Path, Any]) -> None:
    fingerprint = LanguageModel.from_pretrained(str(made[0])).fingerprint
    change_settings(made[0], megatron_config={"x": 1}, megatron_core="antigravity")
    assert LanguageModel.from_pretrained(str(made[0])).fingerprint == fingerprint
    assert "antigravity" not in sys.modules


def test_hub_ids(lm_folder: Folder, made: tuple[Path, Any], tmp_path: Path) -> None:
    """Adapter and base among earlier downloads, without a network."""
    cache = {"cache_dir": str(tmp_path / "cache")}
    change_settings(made[0], base_model_name_or_path="org/base", revision="main")
    for name, folder in ("base", lm_folder("llama")), ("adapter", made[0]):
        download = tmp_path / "cache" / f"models--org--{name}"
        shutil.copytree(folder, download / "snapshots" / ("a" * 40))
        (download / "refs").mkdir()
        (download / "refs" / "main").write_text("a" * 40)
    lm = LanguageModel.from_pretrained("org/adapter", **cache)
    assert (lm.info["adapter"], lm.info["base"]) == ("org/adapter", "org/base")
    for adapter in ("org/adapter", str(made[0])):
        beside = LanguageModel.from_pretrained("org/base", adapter=adapter, **cache)
        assert beside.fingerprint == lm.fingerprint
    for adapter in ("org/gone", "org/base"):
        reason = f"{adapter} is not .* not among earlier downloads with adapter_config.json"
        with pytest.raises(LanguageModelError, match=reason):
            LanguageModel(LMConfig("org/base", adapter=adapter, **cache))


def test_pickled_weights_are_read_without_running_code(made: tuple[Path, Any]) -> None:
    weights = load_file(made[0] / WEIGHTS)
    lm = LanguageModel.from_pretrained(str(made[0]))
    (made[0] / WEIGHTS).unlink()
    torch.save(weights, made[0] / "adapter_model.bin")
    assert LanguageModel.from_pretrained(str(made[0])).fingerprint == lm.fingerprint
    torch.save({"run": print}, made[0] / "adapter_model.bin")
    with pytest.raises(LanguageModelError, match=r"the adapter of .* cannot be read"):
        LanguageModel.from_pretrained(str(made[0]))


@pytest.mark.parametrize("base", ["llama", "llama-tied"])
def test_resized_vocabulary(base: str, lm_folder: Folder, tmp_path: Path) -> None:
    """The adapter's tokenizer has more tokens, and its weights the whole embedding."""
    adapter, tokenizer = tmp_path / "adapter", small_tokenizer()
    tokenizer.add_tokens(["Zork"])
    adapted = train(lm_folder(base), adapter, lora(["q_proj"]), VOCAB + 4)
    tokenizer.save_pretrained(adapter)
    lm = LanguageModel.from_pretrained(str(adapter))
    assert lm.rows(["Zork lives in"]) == [[2, VOCAB, *word_ids("lives in", bos=False)]]
    with torch.no_grad():
        expected = adapted(input_ids=torch.tensor(lm.rows(["Zork lives in"]))).logits[0, -1]
    logits = lm.domain_logits(["Zork lives in"], range(VOCAB + 4))[0]
    torch.testing.assert_close(logits, expected.double(), atol=1e-4, rtol=1e-5)
    embedding = read_token_embedding(LMConfig(str(adapter)))
    assert len(embedding.weight) == VOCAB + 4 and "Zork" in embedding.stored.tokenizer.get_vocab()
    if base == "llama":
        head = "base_model.model.lm_head.weight"
        change_weights(adapter, lambda w: {key: w[key] for key in w if key != head})
        with pytest.raises(LanguageModelError, match=rf"lacks {head} \(1 in all\)"):
            LanguageModel.from_pretrained(str(adapter))


@pytest.mark.parametrize(
    "trained",
    [
        *({"modules_to_save": saved} for saved in (EMBEDDING, EMBEDDING[:1], EMBEDDING[1:])),
        *({"targets": ["q_proj", *adapted]} for adapted in (EMBEDDING, EMBEDDING[:1])),
        {"trainable_token_indices": [5, VOCAB + 6]},
    ],
)
@pytest.mark.parametrize("base", ["llama", "llama-tied"])
def test_resized_vocabulary_that_is_trained(
    base: str, trained: dict[str, Any], lm_folder: Folder, tmp_path: Path
) -> None:
    """Peft saves the whole embedding and head: twice, or as those below adapters."""
    options = lora(**{"targets": ["q_proj"]} | trained)
    adapted = train(lm_folder(base), tmp_path / "adapter", options, VOCAB + 7)
    if base == "llama" and trained.get("targets") == ["q_proj", "embed_tokens"]:
        with pytest.raises(LanguageModelError, match=r"lacks base_model.model.lm_head.weight"):
            LanguageModel.from_pretrained(str(tmp_path / "adapter"))
        return
    kind = ".modules_to_save." if "modules_to_save" in trained else ".base_layer."
    assert any(kind in key for key in load_file(tmp_path / "adapter" / WEIGHTS))
    lm = LanguageModel.from_pretrained(str(tmp_path / "adapter"))
    tokens = [*TOKEN_IDS, VOCAB + 6]
    expected = naive_logits(adapted, PROMPTS, tokens)
    torch.testing.assert_close(lm.domain_logits(PROMPTS, tokens), expected, atol=1e-3, rtol=1e-4)
    unknown = {"base_model.model.modules_to_save.weight": torch.ones(2)}
    change_weights(tmp_path / "adapter", lambda w: w | unknown)
    with pytest.raises(LanguageModelError, match=r"has base_model.model.modules_to_save.weight"):
        LanguageModel.from_pretrained(str(tmp_path / "adapter"))


def test_quantized_base(lm_folder: Folder, made: tuple[Path, Any], tmp_path: Path) -> None:
    """Rounding again would change the numbers."""
    shutil.copytree(lm_folder("llama"), tmp_path / "base")
    path = tmp_path / "base" / "config.json"
    method = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": method}))
    with pytest.raises(LanguageModelError, match="before the quantization"):
        LanguageModel.from_pretrained(str(tmp_path / "base"), adapter=str(made[0]))


def test_gguf_base(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="install lincorr-lightning[gguf]")
    model = save_toy_gguf(tmp_path / "base.gguf")
    model.save_pretrained(tmp_path / "base")
    adapted = train(tmp_path / "base", tmp_path / "adapter", lora(["q_proj"]))
    lm = LanguageModel.from_pretrained(
        str(tmp_path / "base.gguf"), adapter=str(tmp_path / "adapter")
    )
    rows = torch.tensor(lm.rows(["The city of"]))
    with torch.no_grad():
        expected = adapted(input_ids=rows).logits[0, -1]
    logits = lm.domain_logits(["The city of"], range(len(expected)))[0]
    torch.testing.assert_close(logits, expected.double(), atol=1e-3, rtol=0)


# -- refusals --------------------------------------------------------------------------------------


def cut_short(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-50])


def without(part: str) -> Callable[[Path], None]:
    return lambda f: change_weights(f, lambda w: {k: v for k, v in w.items() if part not in k})


def spoil(folder: Path) -> None:
    change_weights(folder, lambda weights: {k: w * torch.nan for k, w in weights.items()})


def settings(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: change_settings(folder, **changes)


Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj.lora"
BROKEN: list[tuple[Callable[[Path], None], list[str]]] = [
    (lambda f: (f / WEIGHTS).unlink(), ["lacks adapter_model.safetensors"]),
    (lambda f: (f / "adapter_config.json").write_text("{"), ["adapter_config.json", "JSON"]),
    (settings(base_model_name_or_path=None), ["names no LM", "lm.adapter"]),
    (settings(base_model_name_or_path="./gone"), ["(named in ", "./gone does not exist"]),
    (settings(base_model_name_or_path="org/gone"), ["org/gone, the base of ", "lm.adapter"]),
    (settings(peft_type="ZORK"), ["peft_type ZORK", "such as plain LORA"]),
    (settings(peft_type="XLORA"), ["peft_type XLORA", "such as plain LORA"]),
    (settings(arrow_config={"top_k": 1}), ["LORA with arrow_config", "such as plain LORA"]),
    (settings(r=3), [Q_PROJ.removesuffix(".lora"), "lm.name_or_path"]),
    (settings(target_modules=["q_proj"]), [f"{WEIGHTS} has base_model", "(24 in all)"]),
    (cut_short, ["cannot be read", "complete"]),
    (spoil, [f"{WEIGHTS} has NaN or infinite values in base_model", "earlier checkpoint"]),
    (without("layers.0.self_attn.q_proj.lora_B"), [f"lacks {Q_PROJ}_B.weight", "trained on"]),
]


@pytest.mark.parametrize(("damage", "fragments"), BROKEN)
def test_broken_adapters(
    damage: Callable[[Path], None], fragments: list[str], made: tuple[Path, Any]
) -> None:
    damage(made[0])
    with pytest.raises(LanguageModelError) as caught:
        LanguageModel.from_pretrained(str(made[0]))
    message = str(caught.value)
    assert all(part in message for part in [str(made[0]), *fragments]), message
    assert "\n" not in message and len(message) < 1000


def test_names_that_do_not_go_together(lm_folder: Folder, made: tuple[Path, Any]) -> None:
    adapter, base = str(made[0]), str(lm_folder("llama"))
    for name, option, reason in [
        (base, base, "of the adapter has no adapter_config.json"),
        (adapter, adapter, r"of the base LM has no config.json .* lm.adapter"),
        (f"{adapter}/{WEIGHTS}", None, "is not a folder.* lm.adapter"),
        (str(made[0].parent), None, "has no config.json .* Did you mean adapter in it"),
        (base, str(made[0].parent), "has no adapter_config.json .* Did you mean adapter in it"),
        (base, "./gone", "the adapter ./gone does not exist"),
    ]:
        with pytest.raises(LanguageModelError, match=reason):
            LanguageModel.from_pretrained(name, adapter=option)
    shutil.copy(Path(base) / "model.safetensors", adapter)
    # transformers would load it with the adapter beside the weights.
    for options in ({}, {"adapter": adapter}):
        with pytest.raises(LanguageModelError, match="holds an LM and a peft adapter"):
            LanguageModel.from_pretrained(adapter, **options)
