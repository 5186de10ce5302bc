"""Hidden states of all layers, against the Hugging Face module itself."""

import pytest
import torch

from lincorr_lightning.errors import LanguageModelError, NonFiniteError
from lincorr_lightning.geometry.token_clouds import read_layers
from lincorr_lightning.lm.language_model import LanguageModel


@pytest.fixture
def lm(small_lm):
    return LanguageModel.from_pretrained(small_lm)


@pytest.mark.parametrize("embedding_layer", [False, True])
def test_all_layers_of_all_tokens(lm, embedding_layer):
    tokens = torch.randint(2, 40, (3, 12), generator=torch.Generator().manual_seed(0))
    hidden, logits = read_layers(lm, tokens, ["a", "b", "c"], embedding_layer)
    with torch.no_grad():
        output = lm.model(input_ids=tokens, output_hidden_states=True)
    expected = torch.stack(output.hidden_states[0 if embedding_layer else 1 :], dim=1)
    assert hidden.shape == (3, 2 + embedding_layer, 12, 16)
    assert torch.equal(hidden, expected)
    assert torch.equal(logits, output.logits)


def test_bos_is_read_and_left_out(small_lm):
    lm = LanguageModel.from_pretrained(small_lm)
    lm.tokenizer.add_special_tokens({"bos_token": "was"})
    lm = LanguageModel.from_module(lm.model, lm.tokenizer, add_bos=True)
    assert lm.prefix == [lm.tokenizer.convert_tokens_to_ids("was")]
    tokens = torch.tensor([[5, 6, 7, 8]])
    hidden, logits = read_layers(lm, tokens, ["a"], embedding_layer=True)
    with torch.no_grad():
        rows = torch.tensor([[*lm.prefix, 5, 6, 7, 8]])
        output = lm.model(input_ids=rows, output_hidden_states=True)
    assert torch.equal(hidden[0], torch.stack(output.hidden_states)[:, 0, 1:])
    assert torch.equal(logits, output.logits[:, 1:])


def test_modes_autocast_and_gradients_are_left_alone(lm):
    lm.model.train()
    lm.model.model.layers[0].eval()
    modes = [part.training for part in lm.modules()]
    with torch.autocast("cpu", torch.bfloat16):
        hidden, _ = read_layers(lm, torch.tensor([[5, 6, 7]]), ["a"])
    assert hidden.dtype == torch.float32
    assert not hidden.requires_grad
    assert [part.training for part in lm.modules()] == modes


@pytest.mark.parametrize("name", ["the embedding layer", "layer 2"])
def test_nan_error_names_the_layer(lm, name):
    if name == "layer 2":
        lm.model.model.layers[1].mlp.down_proj.weight.data[0] = torch.nan
    else:
        lm.model.get_input_embeddings().weight.data[7] = torch.nan
    tokens = torch.tensor([[5, 6], [6, 7]])
    with pytest.raises(NonFiniteError, match=rf"{name} .* for prompt (one|two) in torch.float32"):
        read_layers(lm, tokens, ["one", "two"], embedding_layer=True)


def test_an_lm_without_hidden_states_is_refused(lm, monkeypatch):
    def silent(input_ids, attention_mask=None, **_):
        from transformers.modeling_outputs import CausalLMOutput

        return CausalLMOutput(logits=torch.zeros(*input_ids.shape, 3))

    monkeypatch.setattr(lm.model, "forward", silent)
    with pytest.raises(LanguageModelError, match="does not return the hidden state"):
        read_layers(lm, torch.tensor([[5, 6]]), ["one"])
