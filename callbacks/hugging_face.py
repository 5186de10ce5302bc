"""The callbacks of this package in a Hugging Face ``Trainer``."""

import math
from collections.abc import Sized
from copy import copy
from types import SimpleNamespace
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl
from transformers.trainer_callback import DefaultFlowCallback
from transformers.trainer_utils import IntervalStrategy

from lincorr_lightning.callbacks.periodic_callback import PeriodicCallback, periodic_callbacks
from lincorr_lightning.distributed import gather


class HuggingFaceCallback(TrainerCallback):
    """Runs callbacks of this package in a ``transformers.Trainer``.

    ``Trainer(..., callbacks=[HuggingFaceCallback(Generalization("city->country", edits))])``
    measures as in a LightningModule. What is logged is in ``trainer.state.log_history``, and in the
    metrics of an evaluation with ``eval_`` before its key, so that ``metric_for_best_model`` and
    ``EarlyStoppingCallback`` (after this one) can name it: they are measured on the weights that
    are evaluated, after training, too. Tables and figures go to a folder below ``output_dir``. The
    LM must not be sharded; a resumed run measures from its start.
    """

    def __init__(self, *callbacks: PeriodicCallback) -> None:
        self.callbacks = callbacks
        self._run: Any = None
        self._module: Any = None
        self._is_training = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        module: Any = nn.Module()
        module.net = others["model"]
        module.tokenizer = others.get("processing_class")
        module.automatic_optimization = True
        module.study = "lincorr"
        self._module = module
        self._is_training = True
        # The attributes of Lightning's Trainer that the callbacks use.
        self._run = SimpleNamespace(
            callbacks=list(self.callbacks),
            callback_metrics={},
            reads_all_metrics=True,
            global_step=state.global_step,
            optimizers=[others.get("optimizer")],
            lightning_module=module,
            train_dataloader=None,
            is_last_batch=False,
            val_check_batch=None,
            ckpt_path=state.global_step or None,
            fast_dev_run=False,
            is_global_zero=state.is_world_process_zero,
            logger=None,
            loggers=[],
            log_dir=args.output_dir,
            default_root_dir=args.output_dir,
            strategy=SimpleNamespace(broadcast=lambda x: gather(x)[0], on_train_end=lambda: None),
        )
        self._call("setup", "fit")
        self._call("on_train_start")
        self._log(state)

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._run.is_last_batch = _is_evaluated_after(args, state, others.get("train_dataloader"))
        self._call("on_train_batch_start", None, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._run.global_step = state.global_step
        self._call("on_train_batch_end", None, None, state.global_step)
        self._log(state)

    def on_evaluate(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self._run is None or (metrics := others.get("metrics")) is None:
            return
        if self._is_training:
            self._call("on_validation_epoch_start")
        else:
            for callback in periodic_callbacks(self._run):
                callback.measure_changed_weights()
        self._log(state)
        values = self._run.callback_metrics.items()
        metrics |= {f"eval_{key}": float(value) for key, value in values}

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        # The callbacks keep the LM, for what is evaluated later.
        self._call("on_train_end")
        self._run.strategy.on_train_end()
        self._log(state)
        self._is_training = False

    def _call(self, hook: str, *arguments: Any) -> None:
        for callback in list(self._run.callbacks):
            getattr(callback, hook)(self._run, self._module, *arguments)

    def _log(self, state: Any) -> None:
        points = {
            key: history[-1][1]
            for callback in periodic_callbacks(self._run)
            for key, history in callback.history.items()
            if history[-1][0] == state.global_step
        }
        logged = state.log_history[-1] if state.log_history else {}
        if points and not points.items() <= logged.items():
            state.log_history.append({**points, "step": state.global_step})


def _is_evaluated_after(args: Any, state: Any, loader: Any) -> bool:
    after = copy(state)
    after.global_step += 1
    flow: TrainerControl = DefaultFlowCallback().on_step_end(args, after, TrainerControl())
    if args.eval_strategy != IntervalStrategy.EPOCH or not isinstance(loader, Sized):
        return flow.should_evaluate
    return after.global_step % math.ceil(len(loader) / args.gradient_accumulation_steps) == 0
