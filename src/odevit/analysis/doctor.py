"""What went wrong in a run? Rules that read what a run has written, and name one setting to change.

A rule looks at one failure: it returns a Diagnosis where the records show it, None where they do not or where what it
reads was not written. RULES is ordered from cause to consequence: what comes first is to be changed first.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from odevit.parse import read_json, reading
from odevit.registry import Registry
from odevit.training.config import BUDGETS
from odevit.training.runlog import read_metrics

GROWTH = 5.0  # of a spectral norm (one at the start) or an exponent; healthy runs on digits were seen to reach 3.8
COLLAPSED = 0.95  # of √n, the norm of an attention map in which every token looks at the same one
BLOWN_UP = 10.0  # a loss so many times its smallest one
HARDLY = 0.8  # of its first value: a loss that stays above it has not begun to fall
FLAT = 0.03  # of its value: a loss that falls by less in the last third of the run is on a plateau
POINTS = 0.01  # accuracy that is worth a change, if it is also more than two standard errors
WEAK = 0.5  # as in `odevit.analysis.audit`: a smaller share of the movement explained is a hard teacher


class Curve(NamedTuple):
    label: str
    steps: list[int]
    values: list[float]


@dataclass(frozen=True)
class Diagnosis:
    """failure: its name; words: what the run shows; setting: the one to change; curve: where it is seen."""

    failure: str
    words: str
    setting: str
    curve: Curve | None = None


@dataclass(frozen=True)
class Records:
    """What a run folder holds; empty where a file is missing."""

    train: list[dict[str, Any]]
    val: list[dict[str, Any]]
    monitor: list[dict[str, Any]]
    diverged: list[dict[str, Any]]
    recipe: dict[str, Any]
    config: dict[str, Any]  # of the model
    comparison: dict[str, Any]
    report: dict[str, Any]  # values of the findings
    finished: bool

    @property
    def distilled(self) -> bool:
        return self.recipe.get("task") == "distill"

    def series(self, kind: str, label: str, read: Callable[[dict[str, Any]], float | None]) -> Curve:
        """One value of the records of a kind; those without it are left out."""
        pairs = [(record["step"], value) for record in getattr(self, kind) if (value := read(record)) is not None]
        return Curve(label, [step for step, _ in pairs], [value for _, value in pairs])


def read_records(folder: str | Path) -> Records:
    """Read a run folder; ValueError when it is none."""
    import yaml

    folder = Path(folder)
    if not (folder / "recipe.yaml").is_file():
        raise ValueError(f"{folder} is not a run: it has no recipe.yaml. Give the folder that a training wrote")
    metrics = read_metrics(folder)
    if not metrics:
        raise ValueError(f"{folder} has no metrics.jsonl yet: nothing was trained")

    def table(*names: str) -> dict[str, Any]:
        found = next((folder / name for name in names if (folder / name).is_file()), None)
        return {} if found is None else read_json(found)

    kinds = {
        kind: [record for record in metrics if record["kind"] == kind]
        for kind in ("train", "val", "monitor", "diverged")
    }
    audit = table("audit/report.json").get("values", {})
    return Records(
        **kinds,
        recipe=yaml.safe_load((folder / "recipe.yaml").read_text()),
        config=table("model/config.json", "best/config.json"),
        comparison=table("comparison.json"),
        report=audit | table("report.json").get("values", {}),
        finished=(folder / "result.json").is_file(),
    )


Rule = Callable[[Records], Diagnosis | None]
RULES: Registry[Rule] = Registry("diagnosis")


def register_rule(rule: Rule) -> Rule:
    RULES[rule.__name__] = rule
    return rule


def diagnose(folder: str | Path) -> list[Diagnosis]:
    """Every failure that a run shows, the one to mend first first; empty where nothing is wrong."""
    with reading(f"the run in {folder}"):  # its records may lack what a rule looks for, or hold another kind of thing
        records = read_records(folder)
        return [found for rule in RULES.values() if (found := rule(records)) is not None]


@register_rule
def weights(run: Records) -> Diagnosis | None:
    """A spectral norm of the field far above one, where every matrix starts."""
    norms = run.monitor[-1]["spectral_norms"] if run.monitor else {}
    norms = {name: value for name, value in norms.items() if ".fields." in name}
    worst = max(norms, key=lambda name: norms[name], default=None)
    if worst is None or norms[worst] < GROWTH:
        return None
    curve = run.series("monitor", f"spectral norm of {worst}", lambda r: r["spectral_norms"][worst])
    return Diagnosis(
        "weights leave their bounds",
        f"The spectral norm of {worst} is {norms[worst]:.2g}, where it starts at 1: the field becomes steeper than its "
        "steps can follow.",
        "model.spectral_cap=1.5",
        curve,
    )


@register_rule
def diverged(run: Records) -> Diagnosis | None:
    """The loss blew up, or the run ended before its end on the way up."""
    curve = run.series("train", "training loss", lambda r: r["loss"])
    lr = (run.recipe.get("optim") or {}).get("lr")
    setting = "optim.lr" if lr is None else f"optim.lr={float(lr) / 4:.2g}"
    if run.diverged:
        return Diagnosis("training diverged", run.diverged[-1]["what"], setting, curve if curve.values else None)
    if not curve.values:
        return None
    finite = [value for value in curve.values if math.isfinite(value)]
    if finite and len(finite) == len(curve.values) and finite[-1] < BLOWN_UP * min(finite):
        return None
    return Diagnosis(
        "training diverged",
        f"The loss went from its smallest value {min(finite, default=math.nan):.3g} to {curve.values[-1]:.3g}.",
        setting,
        curve,
    )


@register_rule
def attention(run: Records) -> Diagnosis | None:
    """Maps in which all tokens look at one: ‖P‖₂ near √n."""
    curve = run.series("monitor", "norm of the attention maps", lambda r: r.get("map_norm", {}).get("median"))
    size, patch = run.config.get("image_size"), run.config.get("patch_size")
    if not curve.values or not size or not patch:
        return None
    tokens = 1 + (size // patch) ** 2 + run.config.get("num_registers", 0)
    if curve.values[-1] < COLLAPSED * math.sqrt(tokens):
        return None
    key = "distill.losses.jasmin" if run.distilled else "penalties.jasmin"
    return Diagnosis(
        "attention leaves its bounds",
        f"The norm of the attention maps is {curve.values[-1]:.2g}, near √{tokens} = {math.sqrt(tokens):.2g}: every "
        "token looks at the same one, where attention is steepest.",
        f"{key}=0.01",
        curve,
    )


@register_rule
def exponents(run: Records) -> Diagnosis | None:
    """The top exponent per layer has grown, and is not coming down."""
    curve = run.series("monitor", "largest exponent", lambda r: median(r["lyapunov"]) if r.get("lyapunov") else None)
    values = curve.values
    if len(values) < 3 or values[-1] < GROWTH * max(values[0], 0.1) or values[-1] < 0.8 * max(values):
        return None
    return Diagnosis(
        "exponents rise",
        f"The largest exponent rose from {values[0]:.2f} to {values[-1]:.2f} per layer: small "
        f"differences grow {math.exp(values[-1]):.1f}-fold in a layer.",
        "model.spectral_cap=1.5",
        curve,
    )


@register_rule
def hard_teacher(run: Records) -> Diagnosis | None:
    """What `odevit audit` found, when its report lies in the run's folder or in audit/."""
    verdict = run.report.get("audit/verdict")
    if not verdict:
        return None
    wanted, have = verdict["suggested_fields"], run.config.get("num_fields", 1)
    if wanted <= have and verdict["explained_by_suggested_fields"] >= WEAK:
        return None
    return Diagnosis(
        "a hard teacher",
        f"The audit says that one field explains {verdict['explained_by_one_field']:.0%} of this teacher's movement, "
        f"{wanted} fields {verdict['explained_by_suggested_fields']:.0%}; the student has {have}.",
        f"model.num_fields={max(wanted, have + 1)}",
    )


def _steps_curve(run: Records) -> tuple[Curve, float, float] | None:
    """Accuracy by number of steps, the model's own accuracy, and what difference is worth a change."""
    flow = run.comparison.get("flow") or run.report.get("flow/gap")
    if not flow:
        return None
    by_steps = {int(count): value for count, value in flow["accuracy_by_steps"].items()}
    curve = Curve("accuracy by number of steps", list(by_steps), list(by_steps.values()))
    return curve, flow["own"], max(POINTS, 2 * flow["standard_error"])


@register_rule
def too_few_steps(run: Records) -> Diagnosis | None:
    """More steps of the same weights answer better."""
    found = _steps_curve(run)
    own_steps = run.config.get("num_steps")
    if found is None or own_steps is None:
        return None
    curve, own, enough = found
    better = [(value, count) for count, value in zip(curve.steps, curve.values, strict=True) if count > own_steps]
    if not better or max(better)[0] - own <= enough:
        return None
    best = max(better)[0]
    count = min(count for value, count in better if best - value <= enough / 2)
    return Diagnosis(
        "too few steps",
        f"With {count} steps instead of {own_steps} the same weights are right on {best:.1%} instead of {own:.1%}.",
        f"model.num_steps={count}",
        curve,
    )


@register_rule
def flow_gap(run: Records) -> Diagnosis | None:
    """Right with its own steps, wrong as a flow: a recurrence was learnt."""
    found = _steps_curve(run)
    flow = run.comparison.get("flow") or run.report.get("flow/gap")
    if found is None or flow is None or flow["gap"] <= found[2]:
        return None
    count = run.config.get("num_steps", 6)
    counts: list[Any] = list(range(max(1, count // 2), count + max(1, count // 3) + 1))
    schedule = (run.recipe.get("loop") or {}).get("step_schedule") or []
    drawn = [choice for _, choices in schedule if isinstance(choices, list) for choice in choices]
    if len(drawn) > 1:  # different numbers of steps were not enough: finer ones too
        counts = [*drawn, 2 * max([count, *(choice for choice in drawn if isinstance(choice, int))])]
    return Diagnosis(
        "flow gap",
        f"The exact flow is right on {flow['exact_flow']:.1%}, the {count} steps it was trained with on "
        f"{flow['own']:.1%}: the weights have learnt these steps, not a flow.",
        f"loop.step_schedule=[[0, {json.dumps(counts)}]]",
        found[0],
    )


@register_rule
def plateau(run: Records) -> Diagnosis | None:
    """The path to the teacher is no longer approached, and the steps are not what keeps it away."""
    curve = run.series("train", "path loss", lambda r: r.get("losses", {}).get("cls_path"))
    values, third = curve.values, len(curve.values) // 3
    if third < 2 or not run.comparison:
        return None
    before, after = sum(values[-2 * third : -third]) / third, sum(values[-third:]) / third
    still_falling = before - after > FLAT * before
    flow, agreement = run.comparison.get("flow") or {}, run.comparison.get("agreement", 1.0)
    explained_by_steps = abs(flow.get("gap", 0.0)) > max(POINTS, 2 * flow.get("standard_error", 0.0))
    if still_falling or explained_by_steps or agreement >= 1 - 5 * POINTS:
        return None
    have = run.config.get("num_fields", 1)
    if after > HARDLY * sum(values[:2]) / 2:
        return Diagnosis(
            "path loss on a plateau",
            f"The distance to the teacher's path has hardly moved, from {values[0]:.3g} to {after:.3g}, with "
            f"{agreement:.1%} agreement: the run was too short for it.",
            _longer(run, 4),
            curve,
        )
    return Diagnosis(
        "path loss on a plateau",
        f"The distance to the teacher's path has stayed at {after:.3g} for the last third of the run, with "
        f"{agreement:.1%} agreement; the exact flow answers as the steps do, so it is not their error: the field "
        "cannot follow the path.",
        f"model.num_fields={have + 1}",
        curve,
    )


@register_rule
def outside(run: Records) -> Diagnosis | None:
    """The states end further from the teacher's than the head's radius."""
    curve = run.series("monitor", "distance over radius", lambda r: r.get("distance_over_radius", {}).get("median"))
    if not curve.values or curve.values[-1] <= 1:
        return None
    falling = len(curve.values) > 1 and curve.values[-1] < 0.9 * curve.values[len(curve.values) // 2]
    kl = ((run.recipe.get("distill") or {}).get("losses") or {}).get("kl", 0.0)
    setting = _longer(run, 2) if falling else f"distill.losses.kl={max(1.0, 3 * kl):g}"
    return Diagnosis(
        "outside the contraction region",
        f"The student's last states are {curve.values[-1]:.1f} radii from the teacher's (median): its answers agree by "
        "luck, not for certain" + ("; they still come nearer." if falling else ", and they no longer come nearer."),
        setting,
        curve,
    )


def _longer(run: Records, times: int) -> str:
    """The setting for a run so many times as long."""
    optim = run.recipe.get("optim") or {}
    budget = next((name for name in BUDGETS if optim.get(name)), "epochs")
    return f"optim.{budget}={times * optim.get(budget, 1):g}"
