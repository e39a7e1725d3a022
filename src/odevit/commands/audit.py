"""`odevit audit`: a trained ViT and images in, a report out: would it make a good flow?"""

from pathlib import Path

import torch

from odevit.analysis.audit import audit as examine
from odevit.analysis.report import write_report
from odevit.commands import best_device
from odevit.commands.console import check_output, progress_bars
from odevit.data import DataConfig, load_data, prepare
from odevit.teachers.teacher import load_teacher


def audit(
    teacher: str, data: str, *, image_size: int | None = None, max_images: int = 256, output: Path | None = None
) -> Path:
    """Velocity, curvature and tied-field residual of a ViT's layers, before any training; the path of the report."""
    folder = output or Path("runs/audit")
    check_output(folder / "report.html")
    network = load_teacher(teacher, image_size=image_size).to(best_device())
    loaded = load_data(DataConfig(name=data, image_size=network.image_size), network.frame)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randperm(len(loaded.train), generator=generator)[:max_images].sort().values
    images = prepare(
        loaded.train.fetch(rows)[0], network.image_size, network.mean or loaded.mean, network.std or loaded.std
    )
    with progress_bars() as progress:
        findings = list(examine(network, images, progress=progress))
    command = f"odevit audit {teacher} --data {data} --max-images {max_images}"
    sampling = f"{len(rows)} of {len(loaded.train)} training images, seed 0"
    path = write_report(
        findings,
        folder,
        title=f"Is this ViT ODE-able? {Path(teacher).name}",
        command=command + (f" --image-size {image_size}" if image_size else ""),
        meta={"teacher": teacher, "data": data, "images": sampling},
    )
    print(f"report: {path}")
    return path
