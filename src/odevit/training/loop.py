"""The one loop: train, fine-tune, distil, resume, evaluate. On one process or many, through accelerate.

A run is a folder. Its weights and metrics.jsonl are a function of the recipe alone: the order of the data, the
augmentation, the schedule and the dropout masks are restored, so that a killed run continues bit for bit (on CPU).
"""

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from odevit.atomic import write_file
from odevit.data import Batch, Data, Split, batches, derive_seed, num_batches
from odevit.data.augment import Augment
from odevit.dynamics.cost import count_parameters
from odevit.model.errors import NonFiniteStateError
from odevit.parse import read_json
from odevit.training import checkpoint as ckpt
from odevit.training.claim import Claim, prepare_folder
from odevit.training.classifiers import quiet_transformers, save_classifier
from odevit.training.config import RunConfig
from odevit.training.curve import draw_curve
from odevit.training.evaluation import evaluate, model_input, monitors
from odevit.training.integration import check_schedule, draw_integration
from odevit.training.interruption import StopRequest, TrainingDivergedError, TrainingInterrupted, stop_request
from odevit.training.objectives import LossModule, Objective, Terms
from odevit.training.optim import (
    GROUPING,
    AveragedWeights,
    build_optimizers,
    learning_rate_factor,
    set_learning_rate,
)
from odevit.training.resume import load_run, save_run, write_recipe
from odevit.training.runlog import RunLog, Window, monitor_seconds
from odevit.training.sharding import check_shardable, gathered, load_model_state, shard_, share_buffers


@dataclass
class Result:
    """The selected model (in eval mode), its final numbers, and the run folder."""

    model: Any
    metrics: dict[str, Any]
    folder: Path


def fit(
    config: RunConfig, claim: Claim, *, model: Any, objective: Objective, data: Data, progress_bar: bool = True
) -> Result:
    """Train `model` on `data` as `objective` and `config` say; the selected model with its final numbers."""
    folder = claim.folder
    prepare_folder(config, claim.accelerator, resume=claim.resume)
    run = Run(config, model, objective, objective.training_data(data), claim.accelerator, folder, progress_bar)
    try:
        if claim.resume:
            load_run(run)
        file, ended = folder / "result.json", claim.resume and run.finished(run.elapsed)
        result = read_json(file) if ended and file.exists() else {}
        if ended and result.get("steps") == run.step:
            run.log.say(f"this run is finished: see {file}")
            run.use_best()
            return Result(run.model.eval(), result, folder)
        write_recipe(run)
        with stop_request() as stop:
            run.train(stop)
        return run.finish()
    except ckpt.CheckpointError:
        raise
    except TrainingDivergedError as error:
        run.log.metrics({"kind": "diverged", "step": error.step, "what": str(error)})  # for `odevit doctor`
        raise
    except OSError as error:  # a full or failing disk, or no right to write
        raise ckpt.unwritable(folder, error, run.store.newest()) from error
    finally:
        run.log.close()


class Run:
    """The state of a run, and what happens to it: train, validate, finish. `resume.py` saves and loads it."""

    def __init__(
        self, recipe: RunConfig, model: Any, objective: Objective, data: Data, accelerator: Any, folder: Path, bar: bool
    ):
        self.recipe, self.data, self.objective = recipe, data, objective
        self.accelerator, self.folder = accelerator, folder
        self.steps_per_epoch = num_batches(len(data.train), recipe.optim.batch_size, drop_last=True)
        if self.steps_per_epoch == 0:
            raise ValueError(
                f"optim.batch_size {recipe.optim.batch_size} is more than the {len(data.train)} training images"
            )
        self.total_steps = recipe.optim.steps
        if recipe.optim.epochs is not None:
            self.total_steps = max(1, round(recipe.optim.epochs * self.steps_per_epoch))
        check_schedule(recipe.loop, model.config)
        if recipe.loop.recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if recipe.loop.compile:
            for part in model.odevit.fields if hasattr(model, "odevit") else [model]:
                part.compile()
        if recipe.loop.fsdp:
            check_shardable(recipe)
            shard_(model.to(accelerator.device))
        # what is split already gets only its mixed precision from accelerate, not DDP
        self.module = accelerator.prepare_model(LossModule(model.train(), objective), evaluation_mode=recipe.loop.fsdp)
        self.store = ckpt.CheckpointStore(folder / "checkpoints", recipe.loop.keep)
        self.grouping = self.store.grouping(GROUPING)
        optimizers = build_optimizers(model, recipe.optim, self.grouping)
        self.optimizers = [*map(accelerator.prepare_optimizer, optimizers)]
        self.model = model
        self.average = AveragedWeights(self.model, recipe.optim.ema) if recipe.optim.ema else None
        self.augment = Augment(data.augment or recipe.augment, len(data.class_names))
        self.log = RunLog(folder, main=accelerator.is_main_process, bar=bar, tensorboard=recipe.loop.tensorboard)
        self.window = Window()
        self.step, self.validated_at, self.saved_at, self.saved_step = 0, -1, 0.0, -1
        self.best: dict[str, Any] | None = None
        self.monitored: dict[str, str] = {}  # the newest look at the flow, for the bar
        self.elapsed_before, self.began = 0.0, time.monotonic()
        torch.manual_seed(derive_seed(recipe.seed, "rank", accelerator.process_index))

    # --- where the run stands -----------------------------------------------------------------------------------------

    @property
    def elapsed(self) -> float:
        """Seconds in the loop, validation included, over all sittings."""
        return self.elapsed_before + time.monotonic() - self.began

    def progress(self, elapsed: float) -> float:
        """0 … 1: the middle of the step, so that neither the first nor the last one has a learning rate of zero."""
        if self.total_steps is not None:
            return min(1.0, (self.step + 0.5) / self.total_steps)
        return min(1.0, elapsed / (60 * (self.recipe.optim.minutes or math.inf)))

    def finished(self, elapsed: float) -> bool:
        return self.progress(elapsed) >= 1.0 if self.total_steps is None else self.step >= self.total_steps

    def agree(self, stop: StopRequest) -> tuple[int, float]:
        """(signal, elapsed seconds) on which all processes act: the largest that any of them has."""
        if self.accelerator.num_processes == 1:
            return stop.number, self.elapsed
        both = torch.tensor([float(stop.number), self.elapsed], device=self.accelerator.device)
        torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MAX)
        return int(both[0]), float(both[1])

    def batches(self) -> Iterator[Batch]:
        """Training batches without end, from the current step on."""
        epoch, start = divmod(self.step, self.steps_per_epoch)
        options: dict[str, Any] = {"seed": self.recipe.seed, "drop_last": True}
        options |= {"rank": self.accelerator.process_index, "world_size": self.accelerator.num_processes}
        while True:
            yield from batches(self.data.train, self.recipe.optim.batch_size, epoch=epoch, start_step=start, **options)
            epoch, start = epoch + 1, 0

    # --- the loop -----------------------------------------------------------------------------------------------------

    def train(self, stop: StopRequest) -> None:
        loop, supply = self.recipe.loop, self.batches()
        eval_every = loop.eval_every or self.steps_per_epoch
        self.window_began, saved = self.elapsed, False
        while True:
            number, elapsed = self.agree(stop)
            self.saved_at = elapsed if saved else self.saved_at
            if self.finished(elapsed):
                break
            if number:
                save_run(self)
                again = f"odevit train {self.folder / 'recipe.yaml'} --resume"
                self.log.say(f"stopped at step {self.step}; continue: {again}")
                raise TrainingInterrupted(128 + number)
            progress = self.progress(elapsed)
            status = self.train_step(next(supply), progress)
            if self.step % loop.log_every == 0:
                self.write_window(progress, status)
            if self.step % eval_every == 0:
                self.validate()
            if loop.monitor_every and self.step % loop.monitor_every == 0:
                self.monitor()
            late = elapsed - self.saved_at > 60 * loop.checkpoint_minutes > 0
            if saved := self.step % (loop.checkpoint_every or eval_every) == 0 or late:
                save_run(self)  # when, all processes agree on at the next step: each by its own clock would part them
        validated = self.validated_at == self.step
        if not validated:
            self.validate()
        if not validated or self.saved_step != self.step:
            save_run(self)

    def train_step(self, batch: Batch, progress: float) -> dict[str, Any]:
        """One step of the optimisers on one global batch. Returns what is worth writing down about it."""
        config, accelerator = self.recipe.optim, self.accelerator
        factor = learning_rate_factor(progress, config.warmup, config.cycles)
        set_learning_rate(self.optimizers, factor)
        integration = draw_integration(self.recipe.loop, progress, self.recipe.seed, self.step)
        pieces, loss = self.prepare(batch), 0.0
        for i, piece in enumerate(pieces):
            share = len(piece[0]) / batch.total  # of the global batch: pieces and processes add up to its mean
            with nullcontext() if i == len(pieces) - 1 else accelerator.no_sync(self.module):
                with self.divergence():
                    terms: Terms = self.module(*piece, progress, integration)
                total = torch.stack(list(terms.losses.values())).sum()
                accelerator.backward(total * (share * accelerator.num_processes))  # DDP averages over processes
            loss += share * float(total.detach())
            self.window.add(terms, piece[1], share)
        norm = float(gathered(accelerator.clip_grad_norm_(self.module.parameters(), config.clip or math.inf)))
        # with a loss scaler (fp16) single infinite gradients are expected, and their steps are skipped
        if not math.isfinite(loss) or (accelerator.scaler is None and not math.isfinite(norm)):
            what = f"the loss is {loss:g}, the norm of its gradient {norm:g}"
            raise TrainingDivergedError(self.step, what, self.store.newest())
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if self.average is not None:
            self.average.update(self.model, self.step)
        self.step += 1
        return {"lr": config.lr * factor, "gradient_norm": norm, "evaluations": terms.evaluations}

    @contextmanager
    def divergence(self, where: str = "") -> Iterator[None]:
        """Within it a state that is not finite says at which step of the training, and what there is to go back to."""
        try:
            yield
        except NonFiniteStateError as error:
            raise TrainingDivergedError(self.step, f"{where}{error}", self.store.newest()) from error

    def prepare(self, batch: Batch) -> list[tuple[torch.Tensor, ...]]:
        """Augmented, normalised images, smoothed targets and indices, in `accumulate` pieces."""
        device, config = self.accelerator.device, self.recipe.optim
        images, targets = self.augment(
            batch.images.to(device),
            batch.labels.to(device),
            seed=derive_seed(self.recipe.seed, "augment", self.step),
            start=batch.start,
            total=batch.total,
        )
        targets = (1 - config.label_smoothing) * targets + config.label_smoothing / targets.shape[1]
        tensors = model_input(self.model, images), targets, batch.indices.to(device)
        return list(zip(*(tensor.chunk(config.accumulate) for tensor in tensors), strict=True))

    def write_window(self, progress: float, status: dict[str, Any]) -> None:
        """One line of metrics.jsonl, one of timing.jsonl, and the bar."""
        means, stage = self.window.take(self.accelerator), self.objective.stage(progress)
        epoch = round(self.step / self.steps_per_epoch, 4)
        self.log.metrics({"kind": "train", "step": self.step, "epoch": epoch, "stage": stage, **means, **status})
        seconds, self.window_began = self.elapsed - self.window_began, self.elapsed
        speed = self.recipe.loop.log_every * self.recipe.optim.batch_size / max(seconds, 1e-9)
        self.log.timing({"step": self.step, "seconds": round(self.elapsed, 3), "images_per_second": round(speed, 1)})
        shown = {"step": f"{self.step}", "loss": f"{means['loss']:.4f}"}
        shown |= {} if means["top1"] is None else {"acc": f"{means['top1']:.1%}"}
        shown |= {} if self.best is None else {"best val": f"{self.best['top1']:.2%}"}
        shown |= {"images/s": f"{speed:.0f}"}
        shown |= {} if status["evaluations"] is None else {"evaluations/image": f"{status['evaluations']}"}
        self.log.show(progress, stage, shown | self.monitored)

    def evaluation_weights(self) -> Any:
        """A context in which the model holds the weights to evaluate and save: the averaged ones when they are on."""
        return self.average.swapped_in(self.model) if self.average is not None else nullcontext()

    def evaluate(self, split: Split) -> dict[str, Any]:
        size = self.recipe.loop.eval_batch_size
        return evaluate(self.model, split, batch_size=size, accelerator=self.accelerator)

    def validate(self) -> None:
        """Evaluate on the validation split; the best weights so far are kept in best/."""
        began = self.elapsed
        with self.evaluation_weights():
            share_buffers(self.model, self.accelerator)
            with self.divergence("in validation, "):
                scores = self.evaluate(self.data.val)
            self.validated_at = self.step
            self.log.metrics({"kind": "val", "step": self.step, **scores})
            if self.best is None or scores["top1"] > self.best["top1"]:
                self.best = {"step": self.step, **scores}
                self.write_model(self.folder / "best", self.best)
        self.window_began += self.elapsed - began  # the speed shown is that of training

    def monitor(self) -> None:
        """Look at the flow of a few validation images; what that cost goes into timing.jsonl."""
        if not self.accelerator.is_main_process:
            return
        began = self.elapsed
        with self.divergence("in a monitor, "):
            record = monitors(self.model, self.data.val, self.objective.watch)
        self.log.metrics({"kind": "monitor", "step": self.step, **record})
        self.log.timing({"step": self.step, "monitor_seconds": round(self.elapsed - began, 3)})
        shown = {"sigma_max": "σ_max", "distance_over_radius": "distance/radius"}
        self.monitored = {label: f"{record[name]['median']:.2g}" for name, label in shown.items() if name in record}
        self.window_began += self.elapsed - began

    # --- the end ------------------------------------------------------------------------------------------------------

    def write_model(self, target: Path, facts: dict[str, Any]) -> None:
        state = gathered(self.model.state_dict())

        def write(folder: Path) -> None:
            save_classifier(self.model, folder, state)
            (folder / "selected.json").write_text(json.dumps(facts))

        if self.accelerator.is_main_process:
            ckpt.write_folder(target, write)
        self.accelerator.wait_for_everyone()

    def use_best(self) -> dict[str, Any]:
        """Load the weights that were best on the validation split; returns what is known of them."""
        with quiet_transformers():
            best = type(self.model).from_pretrained(self.folder / "best")
        load_model_state(self.model, best.state_dict())
        return json.loads((self.folder / "best" / "selected.json").read_text())

    def finish(self) -> Result:
        """Select on validation, read the test split once, and write model/, result.json and curve.png."""
        seconds, selected = self.elapsed, self.use_best()
        if self.recipe.penalties.margin:
            from odevit.dynamics.contraction_certificate import settle_head

            settle_head(self.model.eval())
        split = "val" if self.data.test is None else "test"
        scores = self.evaluate(self.data.val if self.data.test is None else self.data.test)
        parameters = count_parameters(self.model)
        metrics = {
            **scores,
            "split": split,
            "note": f"measured once, on the {split} split, with the weights of the best validation accuracy",
            "selected": selected,
            "steps": self.step,
            "epochs": round(self.step / self.steps_per_epoch, 3),
            "seconds": round(seconds, 1),
            "parameters": parameters["total"],
            "trainable_parameters": parameters["trainable"],
            "corrupt_images_skipped": self.data.skipped,
            "versions": ckpt.library_versions(),
        }
        if split == "val":
            metrics["note"] = "there is no test split: these are the validation numbers that selected the weights"
        self.write_model(self.folder / "model", metrics)
        if self.accelerator.is_main_process:
            draw_curve(self.folder)
            if looks := monitor_seconds(self.folder):
                self.log.say(f"monitors: {len(looks)} looks, {sum(looks):.1f} s of {seconds:.0f} s; see curve.png")
            write_file(self.folder / "result.json", json.dumps(metrics, indent=1))
        self.log.say(f"{split} top-1 {scores['top1']:.2%} after {self.step} steps, {seconds:.0f} s: {self.folder}")
        return Result(self.model.eval(), metrics, self.folder)
