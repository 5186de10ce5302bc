"""Hidden states of all layers, against the Hugging Face module itself."""

import pytest
import torch

from lincorr_lightning.data.texts import TokenBatch
from lincorr_lightning.errors import LanguageModelError, SubjectsError
from lincorr_lightning.geometry.token_clouds import CloudSettings, observe_prompts, read_layers
from lincorr_lightning.lm.language_model import LanguageModel


@pytest.fixture
def lm(small_lm):
    return LanguageModel.from_pretrained(small_lm)


def test_all_layers_of_all_tokens(lm):
    tokens = torch.randint(2, 40, (3, 12), generator=torch.Generator().manual_seed(0))
    hidden, logits = read_layers(lm, tokens, ["a", "b", "c"])
    with torch.no_grad():
        output = lm.model(input_ids=tokens, output_hidden_states=True)
    assert hidden.shape == (3, 2, 12, 16)
    assert torch.equal(hidden, torch.stack(output.hidden_states[1:], dim=1))
    assert torch.equal(logits, output.logits)


def test_bos_is_read_and_left_out(small_lm):
    lm = LanguageModel.from_pretrained(small_lm)
    lm.tokenizer.add_special_tokens({"bos_token": "was"})
    lm = LanguageModel.from_module(lm.model, lm.tokenizer, add_bos=True)
    assert lm.prefix == [lm.tokenizer.convert_tokens_to_ids("was")]
    hidden, logits = read_layers(lm, torch.tensor([[5, 6, 7, 8]]), ["a"])
    with torch.no_grad():
        rows = torch.tensor([[*lm.prefix, 5, 6, 7, 8]])
        output = lm.model(input_ids=rows, output_hidden_states=True)
    assert torch.equal(hidden[0], torch.stack(output.hidden_states[1:])[:, 0, 1:])
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


def test_an_lm_without_hidden_states_is_refused(lm, monkeypatch):
    def silent(self, input_ids, attention_mask=None, **_):
        from transformers.modeling_outputs import CausalLMOutput

        return CausalLMOutput(logits=torch.zeros(*input_ids.shape, 3))

    monkeypatch.setattr(type(lm.model), "forward", silent)
    with pytest.raises(LanguageModelError, match="does not return the hidden state"):
        read_layers(lm, torch.tensor([[5, 6]]), ["one"])


def test_too_few_distinct_states_are_refused(lm):
    for weight in lm.model.parameters():
        weight.data.zero_()
    batch = TokenBatch(torch.tensor([[5, 6, 7, 8]]), ["some text"], ["some corpus"])
    with pytest.raises(SubjectsError, match=r"some text has 1 distinct .* layer 1.*range_scalings"):
        observe_prompts(lm, batch, CloudSettings(4, [2], [1]))
