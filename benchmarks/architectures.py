"""Which causal LMs of transformers work: one small random LM of each type, each in a process.

    python -m benchmarks.architectures [--model_types "[TYPE, …]"]

The LM of a type is built from the default configuration with the sizes of architectures.yaml, gets
random weights, is saved, and is then used as a user would: read, probed, edited. The right numbers
come from transformers, peft and torch alone: one prompt at a time, one edit at a time. A type that
cannot be built is listed as not tried. Results are kept in benchmarks/results/architectures.json,
so that a run that was interrupted goes on; docs/architectures.md gets the tables.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers as hf
import yaml
from jsonargparse import auto_cli
from pandas import DataFrame
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks import common
from benchmarks.speed.stacked_edits import train
from lincorr_lightning.cli import main as lincorr
from lincorr_lightning.errors import LincorrError
from lincorr_lightning.finetune.adapters import AdapterSettings
from lincorr_lightning.finetune.stacked_lora import StackedLoRA
from lincorr_lightning.lm.language_model import LanguageModel

PATH = common.RESULTS / "architectures.json"
SECONDS = 600  # of a type
_SETTINGS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
_SIZES = {name: size for size, names in _SETTINGS["sizes"].items() for name in names}
_SPECIAL = ("token_id", "token_index", "eos_idx", "bos_idx", "pad_idx")
_SMALL = 128


def types() -> list[str]:
    """Return the model types of ``AutoModelForCausalLM``."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(model_type: str, vocab_size: int) -> Any:
    """Return the default configuration of a model type with small sizes."""
    options = _SETTINGS["exceptions"].get(model_type, {})
    small = _shrunk(CONFIG_MAPPING[model_type]().to_dict(), vocab_size)
    return CONFIG_MAPPING[model_type].from_dict(_merged(small, options))


def _merged(config: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    merged = dict(config)
    for key, value in options.items():
        own = config.get(key)
        nested = isinstance(value, dict) and isinstance(own, dict)
        merged[key] = _merged(own, value) if nested else value
    return merged


def _shrunk(config: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    small: dict[str, Any] = {}
    layers = [v for k, v in config.items() if k in ("num_hidden_layers", "num_layers", "n_layer")]
    for key, value in config.items():
        if key == "per_layer_config":  # sizes of layers that a small LM does not have
            continue
        if isinstance(value, dict):
            is_config = isinstance(next(iter(value), None), str)  # id2label has numbers
            small[key] = _shrunk(value, vocab_size) if is_config else value
        elif type(value) is int and "vocab_size" in key:
            small[key] = min(_SIZES.get(key, vocab_size), vocab_size)
        elif type(value) is int and key.endswith(_SPECIAL):
            small[key] = min(value, 3)
        elif type(value) is int:
            fallback = _SMALL if value > _SMALL and key.endswith(("_size", "_dim")) else value
            small[key] = min(value, _SIZES.get(key, fallback))
        elif isinstance(value, list) and len(value) > 2 and len(value) in layers:
            kinds = [v for i, v in enumerate(value) if v not in value[:i]]
            small[key] = (kinds * 2)[:2]
        else:
            small[key] = value
    if "kv_lora_rank" in config:  # latent attention: its heads are not grouped
        small |= {"num_key_value_heads": 4, "head_dim": 8, "qk_head_dim": 24}
    for key, size in {"head_dim": 16, "num_key_value_heads": 2}.items():
        if key in config and small[key] is None:
            small[key] = size
    flags = {"is_encoder_decoder": False, "is_decoder": True}
    return small | {key: value for key, value in flags.items() if key in config}


def tiny_model(model_type: str, vocab_size: int) -> Any:
    """Return an LM of a model type with random weights, large enough that all parts count."""
    torch.manual_seed(0)
    model: Any = hf.AutoModelForCausalLM.from_config(tiny_config(model_type, vocab_size))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=2 * parameter.shape[-1] ** -0.5)
            elif "A_log" not in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


SUBJECTS = ("Anna Berg", "Oslo", "the old river", "Tom")
PROMPTS = [
    [f"{subject} {rest}" for subject in SUBJECTS]
    for rest in ("lives in the city of", "lives in the country of", "and his favorite color is")
]
TOKENS = torch.arange(20, 2400, 61)
N_STEPS, LEARNING_RATE = 3, 0.01  # of adapters
EXACT = 1e-4  #: Largest error that is right, relative to the spread of logits between prompts.


def error_of(logits: Tensor, expected: Tensor) -> float:
    """Return the largest error of domain logits in units of their spread between prompts."""
    spread = (expected - expected.mean(0)).std()
    return float((logits.double() - expected.double()).abs().max() / spread)


@torch.no_grad()
def logits_alone(model: Any, rows: Sequence[Sequence[int]]) -> Tensor:
    """Return the logits of `TOKENS` after each row of tokens: a forward pass for each."""
    parts = [model(input_ids=torch.tensor([row]), use_cache=False).logits[0, -1] for row in rows]
    return torch.stack(parts)[:, TOKENS].double()


class Checks:
    """The checks of one LM, in a folder; each returns an error, or raises what a user would see."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lm = self.read()
        self.model: Any = hf.AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
        if self.model._can_set_experts_implementation():  # the others are not for float64
            self.model.set_experts_implementation("eager")
        self.rows = self.lm.rows([prompt for part in PROMPTS for prompt in part])
        self.expected = logits_alone(self.model, self.rows)

    def read(self, **options: Any) -> LanguageModel:
        """Load the LM."""
        name, tokenizer = str(self.folder), str(self.folder / "tokenizer")
        return LanguageModel.from_pretrained(name, tokenizer=tokenizer, **options)

    def logits(self) -> float:
        """Read many prompts at a time."""
        return error_of(self.lm.logits_of_rows(self.rows, TOKENS), self.expected)

    def shared(self) -> float | str:
        """Read the common prefix of a subject's prompts once, where the LM allows."""
        lm = self.read()
        logits = lm.joint_logits(PROMPTS, [TOKENS] * len(PROMPTS))
        expected = torch.cat(list(self.expected.split(len(SUBJECTS))), dim=1)
        error = error_of(logits, expected)
        is_shared = "with shared" in str(lm.reads_prompts)
        return error if is_shared or error > EXACT else f"no: {lm.reads_prompts}"

    def bfloat16(self) -> float:
        """Read in bfloat16: error from float32 in units of the LM's own, one prompt at a time."""
        lm = self.read(dtype="bfloat16")
        model = hf.AutoModelForCausalLM.from_pretrained(self.folder, dtype="bfloat16").eval()
        own = logits_alone(model, self.rows)
        exact = logits_alone(model.float(), self.rows)
        error = lm.logits_of_rows(self.rows, TOKENS).double() - exact
        return float(error.norm() / (own - exact).norm())

    def widened(self) -> float:
        """Read an LM in bfloat16 whose forward pass computes in float32."""
        lm = self.read(dtype="bfloat16")
        rounded = hf.AutoModelForCausalLM.from_pretrained(self.folder, dtype="bfloat16").float()
        logits = lm.logits_of_groups(self.rows, TOKENS, range(len(self.rows)))
        return error_of(logits, logits_alone(rounded.eval(), self.rows))

    def run(self, options: str) -> Any:
        """Run `lincorr fit` on the LM with few edits or subjects, and return its Trainer."""
        lm = f"--model.lm.name_or_path={self.folder} --model.lm.tokenizer={self.folder}/tokenizer"
        log = f"--trainer.default_root_dir={self.folder}/runs --trainer.logger=false {common.QUIET}"
        return lincorr(f"fit --config=configs/{options} {lm} {log}".split()).trainer

    def probe(self) -> None:
        """Fit W of two kinds of knowledge."""
        kinds = "--model.knowledge=[city,country] --model.require_reference=[]"
        self.run(f"linear_probe.yaml {kinds} --data.n_subjects=40")

    def _edit(self, options: str) -> Any:
        few = "--data.n_edits=2 --model.steps_per_edit=2 --model.adapter.rank=4"
        return self.run(
            f"source_finetune.yaml --trainer.callbacks=[Generalization] {few} {options}"
        )

    def full(self) -> float:
        """Train all weights on each of two edits; what is left is the LM as it was."""
        lm = self._edit("--model.method=full").lightning_module.lm
        return error_of(lm.logits_of_rows(self.rows, TOKENS), self.expected)

    def lora(self) -> float:
        """Train adapters side by side, each of which is to be what it is alone."""
        self._edit("--model.method=lora")
        return self.side_by_side()

    def side_by_side(self) -> float:
        """Train two adapters in one LM, and in two by a loop of our own."""
        lm = LanguageModel.from_module(self._precise(), self.lm.tokenizer)
        prompts, answers = self.rows[:2], TOKENS[[3, 9]]
        stack = StackedLoRA(lm.model, 2, AdapterSettings(rank=4, alpha=8.0))
        alone = [self._trained_alone(stack, i, prompts[i], answers[i]) for i in range(2)]
        ids, mask = lm.pad(prompts)
        rows = {"input_ids": ids, "attention_mask": mask}
        with stack.rows([0, 1]):
            train(lm.model, [*stack.parameters()], rows, answers, N_STEPS, LEARNING_RATE)
        assert min(error_of(one, self.expected) for one in alone) > EXACT, "nothing was trained"

        def read(i: int) -> Tensor:
            return lm.logits_of_rows(self.rows, TOKENS, lambda rows: stack.rows([i] * len(rows)))

        return max(error_of(read(i), alone[i]) for i in range(2))

    def _precise(self) -> Any:
        """Return the LM in float64: AdamW takes the sign of gradients that are mere rounding."""
        model = copy.deepcopy(self.model).double()
        try:
            logits_alone(model, self.rows[:1])
        except RuntimeError:  # some of it is in float32 always
            return copy.deepcopy(self.model)
        return model

    def _trained_alone(self, stack: StackedLoRA, i: int, row: list[int], answer: Tensor) -> Tensor:
        model, factors = self._precise().requires_grad_(False), []
        for name in stack.targets:
            down, up = (
                part[name.replace(".", "/")][i].detach().clone().requires_grad_()
                for part in (stack.lora_A, stack.lora_B)
            )
            factors += [down, up]

            def add(_: Any, args: Any, output: Tensor, down: Any = down, up: Any = up) -> Tensor:
                return output + stack.scaling * args[0] @ down.T @ up.T

            model.get_submodule(name).register_forward_hook(add)
        ids = torch.tensor([row])
        rows = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        train(model, factors, rows, answer[None], N_STEPS, LEARNING_RATE)
        return logits_alone(model, self.rows)

    def joint(self) -> float:
        """Train one adapter on both edits, save the LM and read it again."""
        options = "--model.protocol=joint --model.save_model=true --model.learning_rate=0.01"
        trainer = self._edit(f"--model.method=lora {options}")
        trained = trainer.lightning_module.lm.logits_of_rows(self.rows, TOKENS)
        saved = next(self.folder.glob("runs/**/model"))
        again = hf.AutoModelForCausalLM.from_pretrained(saved, dtype="float32").eval()
        assert error_of(trained, self.expected) >= EXACT, "the training changed no logits"
        return error_of(logits_alone(again, self.rows), trained)


LIMITS = {"bfloat16": 1.5, "lora": 1e-2, "joint": 1e-3}
# The method of `Checks` and the heading of the table.
CHECKS = {
    "logits": "logits",
    "shared": "shared prefixes",
    "bfloat16": "bfloat16",
    "widened": "bfloat16 in float32",
    "probe": "probe",
    "full": "full fine-tuning",
    "lora": "LoRA side by side",
    "joint": "joint LoRA, saved",
}


def examine(model_type: str) -> dict[str, str]:
    """Return the outcome of each check of a model type: ok, no, refused, WRONG or TRACEBACK."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            save_tiny_lm(model_type, folder)
        except Exception as error:
            return {"built": f"no: {_line(error).partition('. ')[0]}"}
        outcomes, checks = {"built": "ok"}, None
        outcomes["loads"], checks = _outcome(lambda: Checks(folder), EXACT)
        for check in CHECKS if checks is not None else ():
            outcomes[check], _ = _outcome(getattr(checks, check), LIMITS.get(check, EXACT))
    return {check: one.replace(name, "FOLDER") for check, one in outcomes.items()}


def save_tiny_lm(model_type: str, folder: Path) -> None:
    """Save a random LM of a model type, and the tokenizer of the tiny world."""
    tokenizer = LanguageModel({}).tokenizer
    model = tiny_model(model_type, len(tokenizer))
    with torch.no_grad():
        logits = model(input_ids=torch.arange(5, 12)[None], use_cache=False).logits
    if not logits.isfinite().all():
        raise ValueError("its logits are not finite")
    model.save_pretrained(folder)
    # Beside the LM: in its folder, transformers would take some types' own class of tokenizers.
    tokenizer.save_pretrained(folder / "tokenizer")
    hf.AutoModelForCausalLM.from_pretrained(folder)


def _outcome(check: Callable[[], Any], limit: float) -> tuple[str, Any]:
    try:
        value = check()
    except LincorrError as error:
        return f"refused: {_line(error)}", None
    except Exception as error:
        return f"TRACEBACK: {type(error).__name__}: {_line(error)}", None
    if isinstance(value, float):
        return f"{'ok' if value <= limit else 'WRONG'}: {value:.1e}", value
    return value if isinstance(value, str) else "ok", value


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:400]


def _in_process(model_type: str) -> dict[str, str]:
    """Examine a type in a process of its own, with a limit of time."""
    with multiprocessing.Pool(1, _be_quiet) as pool:
        try:
            return pool.apply_async(examine, (model_type,)).get(SECONDS)
        except multiprocessing.TimeoutError:
            return {"built": "ok", "loads": f"TRACEBACK: no end, or a crash, in {SECONDS} s"}


def _be_quiet() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    torch.set_num_threads(1)


_STATE_SPACE = ("mamba", "ssm", "state_size", "linear_", "conv_L", "lru_", "time_step", "rescale")


def family_of(model_type: str) -> str:
    """Return the family of a type, by what its configuration has."""
    config: Any = tiny_config(model_type, _SMALL)
    keys = config.get_text_config().to_dict()
    if config.get_text_config() is not config:
        return "multimodal"
    if "encoder_layers" in keys or hasattr(config, "cross_attention_hidden_size"):
        return "decoder of an encoder-decoder"
    if type(config) in hf.MODEL_FOR_MASKED_LM_MAPPING:
        return "encoder as a decoder"
    if any(key.startswith(_STATE_SPACE) for key in keys):
        return "state space or linear attention, also hybrid"
    if any("expert" in key for key in keys):
        return "mixture of experts"
    return "latent attention" if "kv_lora_rank" in keys else "dense decoder"


def tables(results: dict[str, dict[str, str]]) -> dict[str, str]:
    """Return the tables of docs/architectures.md, by their markers."""
    built = {name: outcomes for name, outcomes in results.items() if outcomes["built"] == "ok"}
    right = DataFrame(
        {
            text: [outcomes.get(check, "").startswith("ok") for outcomes in built.values()]
            for check, text in CHECKS.items()
        }
    )
    right.insert(0, "types", True)
    counts = right.groupby([family_of(name) for name in built]).sum()
    counts.loc["all"] = right.sum()
    exceptions = []
    for name, outcomes in built.items():
        for outcome in dict.fromkeys(outcomes.values()):
            if not outcome.startswith(("ok", "no")):
                checks = [text for check, text in CHECKS.items() if outcomes.get(check) == outcome]
                what = ", ".join(checks) if len(checks) < len(CHECKS) else "all"
                exceptions.append([name, what, outcome.partition(". ")[0]])
    not_tried = [name for name in results if name not in built]
    return {
        "architectures": common.markdown_frame(counts, "family"),
        "architectures_exceptions": common.markdown_table(["type", "what", "outcome"], exceptions),
        "architectures_not_tried": ", ".join(f"`{name}`" for name in not_tried),
    }


def main(model_types: tuple[str, ...] = (), processes: int = 2) -> None:
    """Examine model types, and write the page.

    Args:
        model_types: Types to examine anew; none takes all that have no result.
        processes: Number of types at a time.
    """
    content = common.read_numbers(PATH) if PATH.exists() else {}
    results = content["types"] if content.get("transformers") == hf.__version__ else {}
    todo = list(model_types) or [name for name in types() if name not in results]
    with ThreadPoolExecutor(processes) as threads:
        for name, outcomes in zip(todo, threads.map(_in_process, todo), strict=True):
            results[name] = outcomes
            ordered = dict(sorted(results.items()))
            common.write_numbers(PATH, {"transformers": hf.__version__, "types": ordered})
            bad = [f"{c}: {o}" for c, o in outcomes.items() if o.startswith(("WRONG", "TRACE"))]
            print(name, *(bad or ["ok"]), sep="\n  ", flush=True)
    common.place_tables(tables(dict(sorted(results.items()))))


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
