"""Prompts after a few-shot prefix or in a chat, against the text built by hand, one at a time."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lincorr_lightning.ablation.module import VocabularyAblation
from lincorr_lightning.cli import main
from lincorr_lightning.data.subjects import SubjectsDataModule
from lincorr_lightning.errors import (
    CheckpointError,
    ConfigError,
    LanguageModelError,
    LinearMapError,
)
from lincorr_lightning.finetune.batches import EditTraining
from lincorr_lightning.finetune.datamodule import EditsDataModule
from lincorr_lightning.finetune.edited_lm import EditedLM
from lincorr_lightning.finetune.forecasts import EditForecast
from lincorr_lightning.geometry.token_geometry import TokenGeometry
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.encoding import chat_lead_in
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.query_cache import Query, QueryCache
from lincorr_lightning.probe.module import LinearProbe
from lincorr_lightning.probe.resilience import MapResilience
from lincorr_lightning.sae.module import SparseAutoencoders
from tests.lm.small_lms import PROMPTS, TOKEN_IDS, Folder, small_tokenizer, word_ids
from tests.toys import quiet_trainer

CHAT = (
    "{% for turn in messages %}"
    "{{ '<s> ' if turn.role == 'user' else 'saw ' }}{{ turn.content | trim }} </s> "
    "{% endfor %}"
)
CLOSE = {"atol": 1e-5, "rtol": 1e-5}
EXAMPLES = "Paris lives in the country of red "


def with_chat(folder: Path | str, template: str = CHAT) -> str:
    Path(folder, "chat_template.jinja").write_text(template)
    return str(folder)


@torch.no_grad()
def naive(model: Any, starts: list[int], end: str, prompts: list[str]) -> torch.Tensor:
    """All logits of one unpadded row at a time, with what is before each prompt, at its end."""
    rows = [starts + word_ids(end + prompt, bos=False) for prompt in prompts]
    logits = [model(input_ids=torch.tensor([row])).logits[0, -1, TOKEN_IDS] for row in rows]
    return torch.stack(logits).double()


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_values_are_those_of_the_text_by_hand(
    name: str, share: bool, lm_folder: Folder, tmp_path: Path
) -> None:
    model = LanguageModel.from_pretrained(str(lm_folder(name))).model
    model.save_pretrained(tmp_path)
    small_tokenizer().save_pretrained(tmp_path)
    folder, shared = with_chat(tmp_path), {"share_prefixes": share}
    few_shot = LanguageModel(LMConfig(folder, **shared), EXAMPLES).load()
    chat = LanguageModel(LMConfig(folder, chat_template=True, **shared), "red blue").load()
    prompts = [[f"{city} lives in the city", f"{city} lives in the country"] for city in PROMPTS]
    by_domain = [list(part) for part in zip(*prompts, strict=True)]
    for lm, start, text in [
        (few_shot, [2], EXAMPLES),
        (chat, [2, *word_ids("red blue", bos=False), 3], "saw "),
    ]:
        for part in by_domain:
            expected = naive(model, start, text, part)
            torch.testing.assert_close(lm.domain_logits(part, TOKEN_IDS), expected, **CLOSE)
        expected = torch.cat([naive(model, start, text, part) for part in by_domain], 1)
        joint = lm.joint_logits(by_domain, [TOKEN_IDS, TOKEN_IDS])
        torch.testing.assert_close(joint, expected, **CLOSE)
        assert ("with shared prefixes" in (lm.reads_prompts or "")) == share


def test_the_last_token_is_that_of_the_prompt(lm_folder: Folder, tmp_path: Path) -> None:
    small_tokenizer("<s> $A </s>").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_bytes((lm_folder("llama") / "config.json").read_bytes())
    config = LMConfig(with_chat(tmp_path), chat_template=True)
    chat = LanguageModel(config, "red")
    few_shot = LanguageModel(LMConfig(str(tmp_path)), EXAMPLES)
    row = word_ids("Oslo lives in", bos=False)
    assert chat.lead_in == "<s> red </s> saw "
    assert chat.rows(["Oslo lives in"]) == [[*word_ids("red </s> saw"), *row]]
    assert few_shot.rows(["Oslo lives in"]) == [[*word_ids(EXAMPLES), *row]]
    for lm in (chat, few_shot):
        assert lm.prefix == [2]


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{{ raise_exception('No\nroles') }}",
        "{{ messages[0].content }}",
        "x {{ messages[1].content | upper }}",
        "{{ messages[1].content | length }} {{ messages[1].content }}",  # changes with the answer
        "{{ strftime_now('%f') }} {{ messages[1].content }}",  # changes with time
        "{{ open('/etc/passwd') }}",
        "{% for",
    ],
)
def test_templates_that_cannot_be_used(template: str | None) -> None:
    tokenizer = small_tokenizer(chat_template=template, name_or_path="MY/LM")
    with pytest.raises(LanguageModelError, match=r"chat template of MY/LM .* lm\.tokenizer"):
        chat_lead_in(tokenizer, "")


def test_one_chat_of_two_lms(small_lm: str, make_lm: Any, tmp_path: Path) -> None:
    folder = with_chat(make_lm(tmp_path))
    plain, chat = LMConfig(folder), LMConfig(folder, chat_template=True)
    for kind in (MapResilience, EditedLM):
        for lm, before in (plain, chat), (chat, plain):
            with pytest.raises(ConfigError, match=r"model.lm.chat_template and model.before.chat"):
                kind(lm=lm, before=before)
        assert kind(lm=chat, before=chat).lm.lead_in


@pytest.mark.parametrize(
    "kind", [EditForecast, SparseAutoencoders, TokenGeometry, VocabularyAblation]
)
def test_studies_without_prompts_refuse_a_chat(kind: Any, small_lm: str) -> None:
    with pytest.raises(ConfigError, match="chat_template is true, but this study reads no prompts"):
        kind(lm=LMConfig(small_lm, chat_template=True))


@pytest.mark.parametrize(
    "prefix", ["Q: Who?\nA: Me. ", "[a, b]", "null", "12", "1e3", "1.5e3", "é \\n 'x'", ""]
)
def test_a_prefix_is_taken_as_it_is(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Not as YAML, which many few-shot texts are."""
    config = ["--config", "configs/linear_probe.yaml", "--print_config"]
    written = json.dumps({"model": {"init_args": {"prefix": prefix}}})
    for given in ("--model.prefix", prefix), ("--config", written):
        with pytest.raises(SystemExit):
            main(["fit", *config, *given])
        shown = yaml.safe_load(capsys.readouterr().out)
        assert shown["model"]["init_args"]["prefix"] == prefix


def test_edits_and_callbacks_read_it(small_lm: str) -> None:
    lm = LanguageModel(LMConfig(small_lm), "Oslo is ").load()
    data = EditsDataModule(lm, n_edits=3, training=EditTraining())
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    prompts = [f"Oslo is {edit.subject} lives in the city of" for edit in batch.edits]
    for row, mask, prompt in zip(batch.input_ids, batch.attention_mask, prompts, strict=True):
        ids = lm.tokenizer(prompt)["input_ids"]
        assert row[mask.bool()].tolist()[: len(ids)] == ids
    plain = LanguageModel.from_pretrained(small_lm)
    expected = plain.domain_logits(["Oslo is name1 lives in the city of"], [5, 6])
    cache = QueryCache(lm)
    copy = LanguageModel.from_pretrained(small_lm).model
    for model in (lm.model, copy):
        cache.exchange(model)
        cache.start_pause(weights_changed=True)
        (logits,) = cache.read([([Query("name1 lives in the city of")], [5, 6])])
        torch.testing.assert_close(logits, expected, **CLOSE)


def fit(folder: Path, lm: LMConfig, ckpt: str | None = None, **options: Any) -> Path:
    names = ["city", "country"]
    probe = LinearProbe(lm=lm, knowledge=names, ridge=0.0, random_labels=0, **options)
    trainer = quiet_trainer(folder)
    data = SubjectsDataModule(probe.lm, n_subjects=200)
    trainer.fit(probe, datamodule=data, ckpt_path=ckpt)
    return Path(trainer.log_dir or "")


def test_a_probe_s_map_and_the_runs_that_may_use_it(make_lm: Any, tmp_path: Path) -> None:
    """Refused with other prefixes, and where a run is resumed."""
    folder = with_chat(
        make_lm(tmp_path / "lm"),
        "Rome {{ messages[0].content }} is {{ messages[1].content }} black",
    )
    config = LMConfig(folder, chat_template=True)
    run = fit(tmp_path / "runs", config, prefix="red")
    settings = json.loads((run / "linear_map" / "config.json").read_text())
    assert settings["knowledge"]["city"]["template"] == "Rome red is {} lives in the city of"
    settings = json.loads((run / "results.json").read_text())["settings"]
    assert settings["prefix"] == "red" and settings["lm"]["chat_template"] is True
    message = "fitted with the city prompt 'Rome red is {} lives in the city of', this run has"
    for other, prefix in [(config, "blue"), (config, ""), (LMConfig(folder), "red")]:
        with pytest.raises(LinearMapError) as caught:
            MapResilience(lm=other, prefix=prefix, linear_map=str(run / "linear_map"))
        assert message in str(caught.value) and "prefix and chat template" in str(caught.value)
    MapResilience(lm=config, prefix="red", linear_map=str(run / "linear_map"))
    (ckpt,) = map(str, run.rglob("*.ckpt"))
    with pytest.raises(CheckpointError, match=r"model.prefix red, this run has blue"):
        fit(tmp_path / "again", config, ckpt, prefix="blue")
    with pytest.raises(CheckpointError, match=r"whose tokenizer .* its prefix, chat template"):
        fit(tmp_path / "again", LMConfig(folder), ckpt, prefix="red")
