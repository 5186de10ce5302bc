"""LoRA: one adapter for all edits, or one per edit, side by side."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from lincorr_lightning.errors import CheckpointError, LanguageModelError
from lincorr_lightning.finetune.adapters import AdapterSettings, add_adapter, save_merged
from lincorr_lightning.lm.language_model import LanguageModel

# -- one adapter for all -----------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["joint", "independent"])
def test_a_checkpoint_holds_the_adapter_alone(finetune, tmp_path, protocol):
    run = finetune(
        trainer={"enable_checkpointing": True, "callbacks": [ModelCheckpoint(tmp_path, "end")]},
        protocol=protocol,
        method="lora",
        adapter=AdapterSettings(rank=2),
        measured=False,
    )
    stored = torch.load(tmp_path / "end.ckpt", weights_only=True)
    assert stored["state_dict"]
    assert all("lora_" in name for name in stored["state_dict"])
    assert not any("base_layer" in name for name in stored["state_dict"])
    n_layers = 2 * 7  # q, k, v, o, gate, up, down
    assert len(stored["state_dict"]) == 2 * n_layers
    assert stored["lm"]["name_or_path"] == run.module.lm.config.name_or_path


def test_independent_edits_on_several_ranks_are_not_resumed(finetune):
    """The checkpoint has the edits of rank 0 alone: the others would be lost silently."""
    run = finetune(measured=False)
    state = run.module.checkpoint_state()
    assert state["n_ranks"] == 1
    run.module.restore(state)
    state["n_ranks"] = 2
    with pytest.raises(CheckpointError, match="2 ranks cannot be resumed"):
        run.module.restore(state)


def test_the_merged_lm_is_the_trained_one(finetune, small_lm):
    run = finetune(
        trainer={"max_epochs": 4},
        protocol="joint",
        method="lora",
        save_model=True,
        learning_rate=1e-2,
    )
    merged = AutoModelForCausalLM.from_pretrained(run.folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(run.folder / "model")
    base = AutoModelForCausalLM.from_pretrained(small_lm)
    assert set(merged.state_dict()) == set(base.state_dict())
    ids = tokenizer("name3 lives in the country of", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        ours, theirs, before = (m(ids).logits for m in (merged, run.module.lm.model, base))
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-4)
    assert (before - theirs).abs().max() > 0.1
    # What is trained goes on: the adapter is still in the LM of the run.
    assert any("lora_A" in name for name in run.module.lm.model.state_dict())
    assert not (run.folder / "model" / "adapter_config.json").exists()


def test_a_saved_lm_with_other_logits_is_refused(small_lm, tmp_path):
    lm = LanguageModel.from_pretrained(str(small_lm))
    # What no file of the LM has.
    lm.model.model.norm.register_forward_hook(lambda _, __, states: states.flip(-1))
    with pytest.raises(LanguageModelError, match="cannot be saved: read again, it has other"):
        save_merged(lm, tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_the_seed_of_the_adapter_is_its_own(small_lm):
    def drawn(seed, stream):
        model = AutoModelForCausalLM.from_pretrained(small_lm)
        torch.manual_seed(stream)
        add_adapter(model, AdapterSettings(seed=seed))
        after = torch.rand(3)
        torch.manual_seed(stream)
        assert torch.equal(after, torch.rand(3))
        state = model.state_dict()
        return torch.cat([v.flatten() for name, v in sorted(state.items()) if "lora_A" in name])

    assert torch.equal(drawn(0, 1), drawn(0, 2))
    assert not torch.equal(drawn(0, 1), drawn(1, 1))


# -- one for each ------------------------------------------------------------------------------


@pytest.mark.slow
def test_edits_side_by_side_are_edits_one_at_a_time(finetune):
    """Eleven edits, eight at a time: the last group is smaller."""
    eight, alone = (
        finetune(
            {"n_edits": 11},
            {"precision": "64-true"},
            method="lora",
            adapter=AdapterSettings(rank=2),
            edits_per_step=together,
            learning_rate=1e-2,
        )
        for together in (8, 1)
    )
    assert len(eight.logits) == 11
    torch.testing.assert_close(eight.logits, alone.logits, atol=1e-9, rtol=1e-7)
    for name in ("source_learned", "hallucinated", "gradient_correlation", "probability_reference"):
        assert eight.results[name] == pytest.approx(alone.results[name], rel=1e-6, abs=1e-9), name
