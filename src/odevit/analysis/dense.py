"""Dense: at which time of the flow do patches know best what they belong to? And which layer of the teacher is that?

Segmentation without drawn masks: a mosaic joins halves of two images along a line of patches, each half where it was,
and the label of a patch is the class of the image it came from. A linear probe (ridge regression on one-hot labels,
in closed form) reads the class from each patch's state alone, at every step of the student and after every block of the
teacher. Mosaics for fitting and for testing are made of different images.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from odevit.analysis import Finding, Study, register_analysis

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RIDGE = 1e-3  # times the mean variance of a feature: steadies directions that hardly vary, and no more
LEAST = 8  # mosaics for fitting and for testing each; fewer say nothing


def mosaics(images: Tensor, labels: Tensor, patch: int, seed: int) -> tuple[Tensor, Tensor]:
    """N images (N, c, S, S) → N mosaics of the same shape, and the classes of their patches (N, M), row by row.

    Image i is joined with a partner drawn at random; the seam is vertical or horizontal, by turns.
    """
    count, side = len(images), images.shape[-1] // patch
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    partner = torch.empty_like(order)
    partner[order] = order.roll(1)  # nobody is its own partner
    second = torch.zeros(count, side, side, dtype=torch.bool)
    second[::2, :, side // 2 :] = True
    second[1::2, side // 2 :, :] = True
    pixels = second.repeat_interleave(patch, 1).repeat_interleave(patch, 2)[:, None].to(images.device)
    joined = torch.where(pixels, images[partner.to(images.device)], images)
    classes = torch.where(second, labels.cpu()[partner][:, None, None], labels.cpu()[:, None, None])
    return joined, classes.flatten(1)


def probe_accuracy(features: Tensor, labels: Tensor, unseen: Tensor, unseen_labels: Tensor, classes: int) -> float:
    """Share of `unseen` (m, d) whose class a ridge regression on `features` (n, d) gets right."""
    features, unseen = features.double(), unseen.double()
    mean = features.mean(dim=0)
    x, targets = features - mean, torch.nn.functional.one_hot(labels, classes).double()
    gram = x.mT @ x / len(x)
    ridge = RIDGE * gram.diagonal().mean() + 1e-12
    weight = torch.linalg.solve(gram + ridge * torch.eye(len(gram)), x.mT @ (targets - targets.mean(dim=0)) / len(x))
    answers = (unseen - mean) @ weight + targets.mean(dim=0)
    return (answers.argmax(dim=1) == unseen_labels).double().mean().item()


def linear_cka(x: Tensor, y: Tensor) -> float:
    """Similarity of two representations (n, d) and (n, d') of the same patches, 0 … 1, whatever their axes.

    Centred kernel alignment with linear kernels (Kornblith et al., ICML 2019).
    """
    x, y = (z.double() - z.double().mean(dim=0) for z in (x, y))
    cross, own, other = (a.mT @ b for a, b in ((x, y), (x, x), (y, y)))
    return (cross.square().sum() / (own.norm() * other.norm()).clamp_min(1e-300)).item()


@torch.no_grad()
def patch_states(study: Study, images: Tensor) -> tuple[Tensor, Tensor | None]:
    """States of the patches: student (K + 1, N·M, d) and teacher (D + 1, N·M, d'), on the CPU."""
    base, count = study.model.odevit, study.model.config.num_patches
    student, teacher = [], []
    comparable = study.teacher is not None and study.teacher.num_patches == count
    for part in images.split(study.batch_size):
        states = base.evolve(base.embed(part), save_at="steps").xs  # (K + 1, b, n, d)
        student.append(states[:, :, 1 : 1 + count].flatten(1, 2).cpu())
        if comparable:
            assert study.teacher is not None
            layers = torch.stack(study.teacher.trace(study.for_teacher(part)).states)  # (D + 1, b, n, d')
            teacher.append(layers[:, :, 1 : 1 + count].flatten(1, 2).cpu())
    return torch.cat(student, dim=1), torch.cat(teacher, dim=1) if comparable else None


@register_analysis("dense", summary="At which time do patches know best what they belong to?")
def run(study: Study) -> Iterator[Finding]:
    """Options: max_images."""
    options = study.settings("dense", max_images=256)
    chosen = study.spread(options["max_images"])
    config, half = study.model.config, len(chosen) // 2
    if half < LEAST:
        reason = f"Skipped: {len(chosen)} images are too few, at least {2 * LEAST} are needed."
        yield Finding("dense/skipped", None, "Not run", reason)
        return
    order = chosen[torch.randperm(len(chosen), generator=torch.Generator().manual_seed(study.seed))]
    parts = [
        mosaics(study.images[rows], study.labels[rows], config.patch_size, study.seed)
        for rows in (order[:half], order[half:])
    ]
    fitted, unseen = (patch_states(study, images) for images, _ in parts)
    study.progress("dense features", 1, 2)
    labels, unseen_labels = (classes.flatten() for _, classes in parts)
    classes = len(study.class_names)

    def accuracies(features: Tensor | None, others: Tensor | None) -> list[float] | None:
        if features is None or others is None:
            return None
        pairs = zip(features, others, strict=True)
        return [probe_accuracy(x, labels, y, unseen_labels, classes) for x, y in pairs]

    times = [time / float(config.horizon) for time in config.time_grid(len(fitted[0]) - 1).times()]
    student, teacher = accuracies(fitted[0], unseen[0]), accuracies(fitted[1], unseen[1])
    assert student is not None
    yield probe_finding(times, student, teacher, labels, len(parts[1][0]))
    if fitted[1] is not None:
        yield similarity_finding(times, fitted[0], fitted[1])
    study.progress("dense features", 2, 2)


def probe_finding(
    times: list[float], student: list[float], teacher: list[float] | None, labels: Tensor, count: int
) -> Finding:
    """The accuracy of the probe along the flow, and the time where it is highest."""
    best = max(range(len(student)), key=student.__getitem__)
    common = (labels.bincount().max() / len(labels)).item()  # always answering the most frequent class
    value: dict[str, Any] = {
        "times": times, "student": student, "best_time": times[best], "best": student[best], "last": student[-1],
        "constant_answer": common, "mosaics": count,
    }  # fmt: skip
    text = (
        f"A linear probe reads the class of the image that a patch came from, on {count} mosaics of two images each: "
        f"best at t/T = {times[best]:.2g} ({student[best]:.1%}), {student[-1]:.1%} at the end, {common:.1%} for always "
        "the same answer"
    )
    if teacher is not None:
        layer = max(range(len(teacher)), key=teacher.__getitem__)
        value |= {"teacher": teacher, "best_layer": layer, "best_of_teacher": teacher[layer]}
        text += f". The teacher is best after block {layer} of {len(teacher) - 1} ({teacher[layer]:.1%})"
    figure = probe_figure(times, student, teacher, common)
    return Finding("dense/probe", value, "Features for dense tasks, by time", f"{text}.", figure)


def similarity_finding(times: list[float], student: Tensor, teacher: Tensor) -> Finding:
    """Which layer of the teacher each time of the student is most like."""
    table = [[linear_cka(layer, state) for state in student] for layer in teacher]  # (D + 1, K + 1)
    alike = [max(range(len(table)), key=lambda layer, k=k: table[layer][k]) for k in range(len(times))]  # type: ignore[misc]
    text = (
        "Similarity (linear CKA) of the patches after each block of the teacher and at each time of the student; 1 is "
        "the same up to rotation and scale. A bright diagonal means that the flow passes the layers in their order."
    )
    value = {"times": times, "cka": table, "most_alike": alike}
    title = "Teacher's layer against student's time"
    return Finding("dense/similarity", value, title, text, similarity_figure(times, table))


def probe_figure(times: list[float], student: list[float], teacher: list[float] | None, common: float) -> "Figure":
    from odevit.analysis.report.style import MUTED, color, figure_style, subplots

    with figure_style():
        figure, axes = subplots(width=5.6, height=3)
        axes.plot(times, [100 * x for x in student], "o-", color=color(0), label="student")
        best = max(range(len(student)), key=student.__getitem__)
        axes.plot(times[best], 100 * student[best], "o", color=color(0), markersize=10, markerfacecolor="none")
        if teacher is not None:
            layers = [layer / (len(teacher) - 1) for layer in range(len(teacher))]
            axes.plot(layers, [100 * x for x in teacher], "x--", color=color(1), label="teacher, by block")
        axes.axhline(100 * common, color=MUTED, linewidth=1, linestyle=":", label="always the same answer")
        axes.set(xlabel="time / horizon (teacher: block / depth)", ylabel="patches right (%)")
        axes.legend(loc="best")
    return figure


def similarity_figure(times: list[float], table: list[list[float]]) -> "Figure":
    from odevit.analysis.report.style import figure_style, subplots

    with figure_style():
        figure, axes = subplots(width=5.6, height=3.2)
        image = axes.imshow(table, origin="lower", aspect="auto", vmin=0, vmax=1, cmap="viridis")
        axes.set_xticks(range(len(times)), [f"{time:.2g}" for time in times])
        axes.set_yticks(range(len(table)))
        axes.grid(False)
        axes.set(xlabel="student's time / horizon", ylabel="teacher's block")
        figure.colorbar(image, ax=axes, label="linear CKA")
    return figure
