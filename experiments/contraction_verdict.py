"""What the numbers of contraction_hypothesis.py say: agreement by ratio, the verdict in words, the table, the figure.

A ratio is ‖c_student - c_teacher‖ / r(c_teacher): below 1 the student's CLS lies inside the teacher's region.
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BINS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, float("inf"))  # of distance / radius
HIGH = 0.9  # agreement that counts as success
POOLED = "all but unused direction"
MANY = 20  # images that a bin needs before a conclusion is drawn from it


@dataclass
class Row:
    family: str
    level: str
    teacher_accuracy: float
    radius: float  # median over test images, as the next two
    distance: float
    ratio: float
    certified: float  # share of the images with distance < radius
    agreement: float
    chance: float  # agreement of independent answers with the same frequencies


def rank_correlation(x: Tensor, y: Tensor) -> float | None:
    """Spearman's, with mean ranks for ties; None where one of the two does not vary."""

    def ranks(values: Tensor) -> Tensor:
        below = (values[None] < values[:, None]).sum(dim=1)
        equal = (values[None] == values[:, None]).sum(dim=1)
        return below + (equal + 1) / 2.0

    a, b = (ranks(values.double()) - (len(values) + 1) / 2 for values in (x, y))
    scale = float(a.norm() * b.norm())
    return float(a @ b) / scale if scale else None


def by_bin(images: list[dict[str, Tensor]]) -> list[dict[str, Any]]:
    """Agreement of all images whose ratio falls in each bin."""
    ratio, same = (torch.cat([image[key] for image in images]) for key in ("ratio", "same"))
    table = []
    for low, high in pairwise(BINS):
        inside = (ratio >= low) & (ratio < high)
        count = int(inside.sum())
        share = same[inside].double().mean().item() if count else None
        table.append({"from": low, "to": high if high < BINS[-1] else None, "images": count, "agreement": share})
    return table


def conclude(results: list[tuple[Row, dict[str, Tensor]]]) -> dict[str, Any]:
    """Numbers for the two directions of the hypothesis, and the verdict that follows from them in words."""
    rows = [row for row, _ in results]
    families = list(dict.fromkeys(row.family for row in rows))
    honest = [(row, images) for row, images in results if row.family != "unused direction"]
    broken = sum(int((~images["same"][images["ratio"] < 1]).sum()) for _, images in results)
    certified = sum(int((images["ratio"] < 1).sum()) for _, images in results)
    bins = {family: by_bin([i for row, i in results if row.family == family]) for family in families}
    bins[POOLED] = pooled = by_bin([images for _, images in honest])
    correlations = {
        family: rank_correlation(*columns([row for row in rows if row.family == family])) for family in families
    }
    correlations[POOLED] = rank_correlation(*columns([row for row, _ in honest]))
    conclusion: dict[str, Any] = {
        "certified_images": certified,
        "certified_images_that_disagree": broken,
        "rank_correlation": correlations,
        "agreement_by_ratio": bins,
        "teachers_beyond_1": [_name(row) for row in rows if row.ratio > 1],
        "teachers_beyond_1_that_succeed": [_name(row) for row in rows if row.ratio > 1 and row.agreement >= HIGH],
        "teachers_within_1": [_name(row) for row in rows if row.ratio <= 1],
        "teachers_within_1_that_fail": [_name(row) for row in rows if row.ratio <= 1 and row.agreement < HIGH],
        "first_ratio_bin_below_90_percent": next(
            (b["from"] for b in pooled if b["images"] >= MANY and b["agreement"] < HIGH), None
        ),
    }
    return {**conclusion, "verdict": verdict(conclusion)}


def _name(row: Row) -> str:
    return f"{row.family} {row.level}"


def columns(rows: list[Row]) -> tuple[Tensor, Tensor]:
    return torch.tensor([row.ratio for row in rows]), torch.tensor([row.agreement for row in rows])


def verdict(conclusion: dict[str, Any]) -> str:
    broken, certified = conclusion["certified_images_that_disagree"], conclusion["certified_images"]
    beyond, succeed = conclusion["teachers_beyond_1"], conclusion["teachers_beyond_1_that_succeed"]
    within, fail = conclusion["teachers_within_1"], conclusion["teachers_within_1_that_fail"]
    just_outside = conclusion["agreement_by_ratio"][POOLED][2]  # ratios from 1 to 2
    correlation, fall = conclusion["rank_correlation"][POOLED], conclusion["first_ratio_bin_below_90_percent"]
    words = [
        f"Inside the region agreement is {'BROKEN' if broken else 'certain'}: of {certified} image-teacher pairs with "
        f"distance < radius, {broken} disagree.",
        f"Outside it is {'not lost' if succeed else 'lost'}: {len(succeed)} of the {len(beyond)} teachers with a "
        f"median ratio above 1 still have at least {HIGH:.0%} agreement{named(succeed)}.",
        f"Of the {len(within)} teachers with a median ratio of at most 1, {len(fail)} have less than "
        f"{HIGH:.0%}{named(fail)}.",
    ]
    if just_outside["images"]:
        share, pairs = just_outside["agreement"], just_outside["images"]
        words.append(f"Between ratios 1 and 2, {share:.1%} of {pairs} pairs agree.")
    if correlation is not None:
        words.append(f"Rank correlation of agreement with the median ratio, {POOLED}: {correlation:.2f}.")
    where = "in no bin with enough pairs" if fall is None else f"first in the bin that starts at ratio {fall:g}"
    words.append(f"Pooled over pairs, {POOLED}, agreement is below {HIGH:.0%} {where}.")
    if broken:
        words.append("So the certificate itself is wrong.")
    elif not succeed:
        words.append("So nothing here contradicts the hypothesis in either direction.")
    elif all(name.startswith("unused direction") for name in succeed):
        words.append(
            "So 'if' holds, and 'only if' fails only for teachers whose radius is short along a direction that no "
            "error takes."
        )
    else:
        words.append("So the hypothesis holds as 'if' and not as 'only if'.")
    return " ".join(words)


def named(teachers: list[str]) -> str:
    return f" ({', '.join(teachers)})" if teachers else ""


def print_rows(rows: list[Row], conclusion: dict[str, Any]) -> None:
    names = "teacher acc.", "radius", "distance", "ratio", "certified", "agreement", "chance"
    print(f"{'family':17} {'level':10} " + " ".join(f"{name:>12}" for name in names))
    for row in rows:
        numbers = f"{row.teacher_accuracy:12.1%} {row.radius:12.4g} {row.distance:12.4g} {row.ratio:12.4g}"
        print(
            f"{row.family:17} {row.level:10} {numbers} {row.certified:12.1%} {row.agreement:12.1%} {row.chance:12.1%}"
        )
    print("\nagreement of image-teacher pairs by distance / radius (pairs in brackets)")
    labels = [f"{low:g}-{high:g}" for low, high in pairwise(BINS)]
    print(f"{'family':25} " + " ".join(f"{label:>14}" for label in labels))
    for family, table in conclusion["agreement_by_ratio"].items():
        cells = [f"{b['agreement']:.1%} ({b['images']})" if b["images"] else "-" for b in table]
        print(f"{family:25} " + " ".join(f"{cell:>14}" for cell in cells))
    shown = {name: "-" if value is None else f"{value:.2f}" for name, value in conclusion["rank_correlation"].items()}
    print("\nrank correlation of agreement with the median ratio: " + ", ".join(f"{k} {v}" for k, v in shown.items()))
    print("\n" + conclusion["verdict"])


def draw(rows: list[Row], conclusion: dict[str, Any], path: Path) -> None:
    from odevit.analysis.report.style import MUTED, color, figure_style, subplots

    with figure_style():
        figure, (left, right) = subplots(1, 2, width=9, height=3.6)
        for index, family in enumerate(dict.fromkeys(row.family for row in rows)):
            mine = sorted((row for row in rows if row.family == family), key=lambda row: row.ratio)
            left.plot([r.ratio for r in mine], [r.agreement for r in mine], "o-", color=color(index), label=family)
            bins = [b for b in conclusion["agreement_by_ratio"][family] if b["images"] >= MANY]
            middle = [(max(b["from"], 0.25) * (b["to"] or 32)) ** 0.5 for b in bins]
            right.plot(middle, [b["agreement"] for b in bins], "o-", color=color(index))
        for axes, title in ((left, "Teachers: median over images"), (right, "Images, by their own ratio")):
            axes.axvline(1, color=MUTED, linewidth=1, linestyle="--")
            axes.set(xscale="log", xlabel="distance / radius", ylabel="agreement with the teacher", title=title)
            axes.set_ylim(0, 1.03)
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=6)
    figure.savefig(path, dpi=130, facecolor="white")
