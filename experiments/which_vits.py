"""Which ViTs can be turned into a flow, and does `odevit audit` know before? Small teachers of six families, on digits.

    python experiments/which_vits.py --json docs/which_vits.json    # 26 teachers, some 15 s of one core each; resumes
    python experiments/which_vits.py --quick        # seconds: a toy budget, the numbers mean nothing

Every teacher is trained for the same number of steps, audited on training images, and distilled with ONE recipe: that
of `odevit distill` without one (CLS path and answers of the teacher, no label), for 8 epochs. Swin merges tokens on
its way, so that no state of a student lines up with its own: it is distilled through its answers alone, its audit goes
stage by stage, and its rows do not enter the correlations. The score is the audit's first number: the share of the
layers' movement, on images not used for fitting, that one autonomous field explains. It was chosen before any student
was trained; other numbers of the audit are printed beside it as an exploration.

Finished rows are read, not run again. Writes one JSON a row below OUTPUT, by the budget, and JSON (all rows and what
follows from them) with a picture beside it.
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from contraction_hypothesis import BATCH, Images, load_images
from contraction_verdict import rank_correlation
from small_teachers import SmallTeacher, small_teachers, train
from studies import rank_interval
from torch import Tensor

from odevit.analysis.audit import FIELD_TOLERANCE, path_shape, suggested_steps, teacher_sample
from odevit.analysis.contraction import agreement
from odevit.analysis.tied_field import (
    Sample,
    constant_residual,
    fit_runs,
    phase_fits,
    sample_tokens,
    suggested_fields,
)
from odevit.atomic import write_file
from odevit.commands.distill import DEFAULT
from odevit.data import load_data
from odevit.distill.answers import build_answers
from odevit.distill.objective import build
from odevit.distill.student import parameter_report
from odevit.recipe import Recipe, override
from odevit.teachers.teacher import load_teacher
from odevit.training.claim import claim_run
from odevit.training.classifiers import adapt_to_data
from odevit.training.loop import fit

SCORE = "explained_by_one_field"
SCORES = {
    SCORE: "one field explains",
    "one_field_of_best": "… of what the best number explains",
    "cls_explained_by_one_field": "one field explains of CLS",
    "explained_by_one_constant_per_layer": "a constant per layer explains",
    "turning": "turning of CLS",
    "suggested_steps": "Euler steps asked for",
}
OUTCOMES = {
    "kept": "kept accuracy", "agreement": "agreement", "certified": "certified agreement", "radius": "radius",
    "distance_over_radius": "distance / radius",
}  # fmt: skip
TURNED = 0.9  # of its teacher's accuracy that a turned student keeps; set when the first rows showed that none has 98 %
TAUGHT = 0.9  # accuracy from which a teacher has learned something; the DINO-type ones have not within this budget
ANSWERS = {  # what stands in the place of its teacher's shape where a student follows answers alone
    "patch_size": 4, "hidden_size": 48, "num_attention_heads": 4, "mlp_ratio": 4, "num_registers": 4, "depth": 6,
    "num_steps": 6,
}  # fmt: skip


# --- audit ------------------------------------------------------------------------------------------------------------


def audit_numbers(sample: Sample) -> dict[str, Any]:
    """What the verdict of `odevit audit` rests on, and the shape of the path of CLS."""
    fits = phase_fits(fit_runs(sample))
    best = max(1 - fit.residual for fit in fits)
    fields, cls = suggested_fields(fits, FIELD_TOLERANCE), path_shape(sample.tokens[:, :, 0])
    others = path_shape(sample.tokens[:, :, 1:])
    return {
        "layers": len(fits),
        SCORE: 1 - fits[0].residual,
        "one_field_of_best": (1 - fits[0].residual) / best,
        "cls_explained_by_one_field": 1 - fits[0].residual_cls,
        "explained_by_one_field_per_layer": 1 - fits[-1].residual,
        "explained_by_one_constant_per_layer": 1 - constant_residual(sample),
        "suggested_fields": fields,
        "suggested_steps": max(suggested_steps(cls), suggested_steps(others)),
        "turning": float(cls.turning.mean()) if len(cls.turning) else 1.0,
    }


@torch.no_grad()
def stage_samples(module: Any, images: Tensor) -> list[Sample]:
    """The states of every stage of a Swin, its mean token in the place of CLS: that is what its head reads."""
    samples = []
    for stage in module.swin.encoder.layers:
        states: list[Tensor] = []
        hooks = [stage.blocks[0].register_forward_pre_hook(lambda _, args, states=states: states.append(args[0]))]
        for block in stage.blocks:
            hooks.append(
                block.register_forward_hook(
                    lambda _, __, output, states=states: states.append(output if torch.is_tensor(output) else output[0])
                )
            )
        try:
            module(images)
        finally:
            for hook in hooks:
                hook.remove()
        stacked = torch.stack([torch.cat([state.mean(dim=1, keepdim=True), state], dim=1) for state in states])
        samples.append(sample_tokens(stacked))
    return samples


def by_layers(stages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The audits of several stages as one: means over layers."""
    layers = sum(stage["layers"] for stage in stages)
    means = {key: sum(stage["layers"] * stage[key] for stage in stages) / layers for key in stages[0]}
    return {**means, "layers": layers, "stages": list(stages)}


# --- one row ----------------------------------------------------------------------------------------------------------


def distilled(module: Any, staged: bool, folder: Path, epochs: float, seed: int) -> tuple[Any, Any]:
    """The student of the one recipe, and its teacher. As `odevit distill`, without its tables and report."""
    values = {**DEFAULT, "data": {"name": "digits"}, "output": str(folder / "student"), "seed": seed}
    assignments = [f"optim.epochs={epochs}", "loop.eval_every=1000000"]
    if staged:
        module.save_pretrained(folder / "teacher")
        values["model"] = ANSWERS
        assignments += [f"distill.teacher={folder / 'teacher'}", "distill.match=answers"]
        assignments += ["distill.losses={kl: 1.0}"]
    recipe = Recipe.from_dict(override(values, assignments))
    with claim_run(recipe, overwrite=True) as claim:
        data = load_data(recipe.data)
        student, objective = build_answers(recipe, data) if staged else build(recipe, data, load_teacher(module))
        student = adapt_to_data(student, data)
        fit(recipe, claim, model=student, objective=objective, data=data, progress_bar=False)  # type: ignore[arg-type]
    return student.eval(), objective.teacher


def measure(teacher: SmallTeacher, images: Images, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Train, audit, distil, compare."""
    clock = [time.process_time()]
    steps = math.ceil(options.teacher_epochs * len(images.train) / BATCH)
    module = train(teacher, images, steps, options.seed)
    clock.append(time.process_time())
    shown = images.train[:: max(1, len(images.train) // options.audited)][: options.audited]
    if teacher.staged:
        audit = by_layers([audit_numbers(sample) for sample in stage_samples(module, shown)])
    else:
        audit = audit_numbers(teacher_sample(load_teacher(module), shown))
    clock.append(time.process_time())
    student, taught_by = distilled(module, teacher.staged, folder, options.student_epochs, options.seed)
    found = agreement(student, taught_by, images.test, images.test_labels, batch_size=512)
    radius = distance = None
    if found["certified"] is not None:
        radius, distance = float(found["radii"].median()), float((found["distances"] / found["radii"]).median())
    right = {who: float(found[f"{who}_right"].double().mean()) for who in ("teacher", "student")}
    clock.append(time.process_time())
    return {
        "family": teacher.family,
        "depth": teacher.depth,
        "layer_scale": teacher.layer_scale,
        "drop_path": teacher.drop_path,
        "teacher_accuracy": right["teacher"],
        "student_accuracy": right["student"],
        "kept": right["student"] / right["teacher"],
        "agreement": found["observed"],
        "certified": found["certified"],
        "note": found["note"],
        "radius": radius,
        "distance_over_radius": distance,
        "parameter_ratio": parameter_report(student, taught_by).ratio,
        "audit": audit,
        "cpu_seconds": dict(zip(("teacher", "audit", "student"), [b - a for a, b in pairwise(clock)], strict=True)),
    }


# --- what follows -----------------------------------------------------------------------------------------------------


def correlations(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Spearman's, of every number of the audit with every outcome, over the rows that have both."""
    result: dict[str, dict[str, Any]] = {}
    for score in SCORES:
        result[score] = {}
        for outcome in OUTCOMES:
            pairs = [(row["audit"][score], row[outcome]) for row in rows if row[outcome] is not None]
            value = rank_correlation(*torch.tensor(pairs, dtype=torch.float64).T) if len(pairs) > 1 else None
            interval = rank_interval(value, len(pairs))
            result[score][outcome] = {"rank_correlation": value, "interval": interval, "n": len(pairs)}
    return result


def verdicts(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """One sentence per family."""
    said = {}
    for family in dict.fromkeys(row["family"] for row in rows):
        mine = [row for row in rows if row["family"] == family]
        turned = sum(row["kept"] >= TURNED for row in mine)
        words = [f"{turned} of {len(mine)} keep {TURNED:.0%} of their accuracy (kept: {span(mine, 'kept')})"]
        words.append(f"agreement {span(mine, 'agreement')}")
        if proven := [row for row in mine if row["certified"] is not None]:
            words.append(f"certified {span(proven, 'certified')}")
        explained = [{"audit": row["audit"][SCORE]} for row in mine]
        said[family] = "; ".join([*words, f"audit {span(explained, 'audit')}"]) + "."
    return said


def span(rows: Sequence[dict[str, Any]], key: str) -> str:
    low, high = min(row[key] for row in rows), max(row[key] for row in rows)
    return f"{100 * low:.1f} %" if high - low < 5e-4 else f"{100 * low:.1f} to {100 * high:.1f} %"


def conclude(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    followed = [row for row in rows.values() if row["family"] != "Swin"]
    taught = [row for row in followed if row["teacher_accuracy"] >= TAUGHT]
    return {
        "score": SCORE,
        "correlations": correlations(followed),
        "correlations_of_good_teachers": correlations(taught),
        "verdicts": verdicts(list(rows.values())),
    }


def shown(entry: dict[str, Any]) -> str:
    """A correlation with its interval and its number of pairs."""
    value, interval = entry["rank_correlation"], entry["interval"]
    about = "" if interval is None else f" [{interval[0]:+.2f}, {interval[1]:+.2f}]"
    return "–" if value is None else f"{value:+.2f}{about}, n = {entry['n']}"


def markdown(rows: dict[str, dict[str, Any]], conclusion: dict[str, Any]) -> str:
    """The tables as they stand in docs/RESULTS.md."""

    def percent(value: float | None) -> str:
        return "–" if value is None else f"{100 * value:.1f}"

    head = ("audit: one field", "fields", "teacher", "student", "kept", "agreement", "certified", "radius", "CPU s")
    lines = ["| teacher | " + " | ".join(head) + " |", "|---" * (len(head) + 1) + "|"]
    for name, row in sorted(rows.items(), key=lambda item: -item[1]["audit"][SCORE]):
        cells = [percent(row["audit"][SCORE]), f"{row['audit']['suggested_fields']:.3g}"]
        cells += [percent(row[key]) for key in ("teacher_accuracy", "student_accuracy", "kept", "agreement")]
        cells += [percent(row["certified"]), "–" if row["radius"] is None else f"{row['radius']:.2f}"]
        lines.append(f"| {name} | " + " | ".join([*cells, f"{sum(row['cpu_seconds'].values()):.0f}"]) + " |")
    for title, found in (
        ("all that a student follows", conclusion["correlations"]),
        (f"teachers of {TAUGHT:.0%} and more", conclusion["correlations_of_good_teachers"]),
    ):
        lines += ["", f"| Spearman, {title} | " + " | ".join(OUTCOMES.values()) + " |"]
        lines += ["|---" * (len(OUTCOMES) + 1) + "|"]
        lines += [
            f"| {SCORES[score]} | " + " | ".join(map(shown, entries.values())) + " |"
            for score, entries in found.items()
        ]
    lines += ["", *(f"* **{family}**: {words}" for family, words in conclusion["verdicts"].items())]
    return "\n".join(lines)


def draw(rows: dict[str, dict[str, Any]], path: Path) -> None:
    """Agreement and certified agreement against the audit's score, one colour a family."""
    from odevit.analysis.report.style import color, figure_style, subplots

    with figure_style():
        figure, panels = subplots(1, 2, width=7.4, height=3.2)
        for axes, outcome in zip(panels, ("agreement", "certified"), strict=True):
            for index, family in enumerate(dict.fromkeys(row["family"] for row in rows.values())):
                mine = [r for r in rows.values() if r["family"] == family and r[outcome] is not None]
                x, y = [r["audit"][SCORE] for r in mine], [r[outcome] for r in mine]
                axes.plot(x, y, "os^DvP"[index % 6], color=color(index), label=family)
            axes.set(xlabel="audit: share that one field explains", title=OUTCOMES[outcome].capitalize())
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    figure.savefig(path, facecolor="white")


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a toy budget that only shows that the script runs")
    parser.add_argument("--only", nargs="+", help="names of teachers; default: all")
    parser.add_argument("--finished", action="store_true", help="train nothing: what the finished rows say so far")
    parser.add_argument("--teacher-epochs", type=float, default=8)
    parser.add_argument("--student-epochs", type=float, default=8)
    parser.add_argument("--audited", type=int, default=600, help="training images that the audit sees")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/which-vits"))
    parser.add_argument("--json", type=Path, help="default: OUTPUT/which_vits.json; the picture lies beside it")
    options = parser.parse_args(arguments)
    if options.quick:
        options.teacher_epochs, options.student_epochs, options.audited = 0.1, 0.1, 40
    teachers = small_teachers()
    if unknown := [name for name in options.only or [] if name not in teachers]:
        parser.error(f"unknown teacher {', '.join(unknown)}; choose from: {'; '.join(teachers)}")
    images, rows, missing = load_images(), {}, []
    budget = f"{options.teacher_epochs:g}-{options.student_epochs:g}-epochs"
    for name in options.only or teachers:
        file = options.output / budget / f"{name.replace(', ', '-').replace(' ', '-')}-seed{options.seed}.json"
        if not file.exists() and options.finished:
            missing.append(name)
            continue
        if not file.exists():
            try:
                row = measure(teachers[name], images, options.output / file.stem, options)
            except ImportError as error:
                missing.append(name)
                print(f"{name} is left out: {error}")
                continue
            file.parent.mkdir(parents=True, exist_ok=True)
            write_file(file, json.dumps(row, indent=1))
        rows[name] = json.loads(file.read_text())
        print(f"{len(rows)} of {len(options.only or teachers)}: {name}", flush=True)
    epochs = {"teacher_epochs": options.teacher_epochs, "student_epochs": options.student_epochs}
    report = {"rows": rows, "left_out": missing, "test_images": len(images.test), **epochs, **conclude(rows)}
    target = options.json or options.output / "which_vits.json"
    write_file(target, json.dumps(report, indent=1) + "\n")
    draw(rows, target.with_suffix(".svg"))
    print("\n" + markdown(rows, report))
    return report


if __name__ == "__main__":
    main()
