import peft
import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn import ModuleDict

from lincorr_lightning.errors import LanguageModelError
from lincorr_lightning.lm.finder import causal_lm_of
from lincorr_lightning.lm.language_model import LanguageModel
from tests.lm.small_lms import config_of, naive_logits, random_model, small_tokenizer, word_ids
from tests.toys import toy_config


@pytest.fixture
def llama() -> hf.PreTrainedModel:
    return random_model(config_of("llama"))


def test_finds_the_lm_at_any_depth(llama: hf.PreTrainedModel) -> None:
    assert causal_lm_of(llama) is llama
    assert causal_lm_of(ModuleDict({"probe": nn.Linear(2, 2), "net": llama})) is llama
    assert causal_lm_of(nn.Sequential(nn.ReLU(), ModuleDict({"net": llama}))) is llama
    assert causal_lm_of(nn.Sequential(LanguageModel.from_module(llama, small_tokenizer()))) is llama
    llama.draft = random_model(config_of("gpt2"))  # a part of it
    assert causal_lm_of(nn.Sequential(llama)) is llama


def test_adapters_of_a_peft_wrapper_count(llama: hf.PreTrainedModel) -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    before = naive_logits(llama, ["Paris lives"], [4, 5])
    wrapped = peft.get_peft_model(llama, config)
    found = causal_lm_of(nn.Sequential(wrapped))
    assert found is llama
    lm = LanguageModel.from_module(found, small_tokenizer())
    ours = lm.domain_logits(["Paris lives"], [4, 5])
    with torch.no_grad():
        theirs = wrapped(input_ids=torch.tensor([word_ids("Paris lives")])).logits[0, -1, 4:6]
    torch.testing.assert_close(ours[0], theirs.double(), atol=1e-5, rtol=0)
    assert (ours - before).abs().max() > 1e-3


def test_learned_prompt_is_refused(llama: hf.PreTrainedModel) -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    wrapped = peft.get_peft_model(llama, config)
    with pytest.raises(LanguageModelError, match=r"prepends a learned prompt .*such as LoRA"):
        causal_lm_of(nn.Sequential(wrapped))


def test_encoders_and_backbones_are_passed_over(llama: hf.PreTrainedModel) -> None:
    encoder = hf.AutoModelForMaskedLM.from_config(toy_config("bert"))
    backbone = hf.AutoModel.from_config(toy_config("llama"))
    t5 = hf.AutoModelForSeq2SeqLM.from_config(toy_config("t5"))
    others = {"a": encoder, "b": backbone, "c": t5}
    assert causal_lm_of(ModuleDict({**others, "lm": llama})) is llama
    with pytest.raises(LanguageModelError, match="no Hugging Face causal LM in ModuleDict"):
        causal_lm_of(ModuleDict(others))


def test_several_are_listed_and_one_can_be_named(llama: hf.PreTrainedModel) -> None:
    module = ModuleDict({"policy": llama, "reference": random_model(config_of("gpt2"))})
    message = r"policy \(LlamaForCausalLM\), reference \(GPT2LMHeadModel\)"
    with pytest.raises(LanguageModelError, match=message):
        causal_lm_of(module)
    assert causal_lm_of(module, "reference") is module["reference"]
    with pytest.raises(LanguageModelError, match="in 'judge' of ModuleDict"):
        causal_lm_of(module, "judge")
