"""ONNX and PT2 files: written, run, quantised and compared with the model they came from."""

import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from odevit.atomic import TEMPORARY, sync, write_file
from odevit.export.graphs import Classifier, Embed, Field, Head, chosen_flow, metadata
from odevit.model.model import OdeViTForImageClassification
from odevit.model.solvers import solve
from odevit.model.spectral import plain_copy

Run = Callable[[Tensor], Tensor]  # images (b, c, S, S) -> logits (b, classes)
TOLERANCE = 1e-4  # largest difference of a logit from eager PyTorch's


def write_onnx(
    model: OdeViTForImageClassification, file: Path, num_steps: int | None = None, solver: str | None = None
) -> None:
    """The whole classifier with the steps unrolled: `images` → `logits`, any batch size."""
    steps, solver = chosen_flow(model, num_steps, solver)
    network, notes = plain_copy(model), metadata(model, steps, solver)
    write_graph(Classifier(network, steps, solver), (example(network),), file, ["images"], ["logits"], notes)


def write_parts(
    model: OdeViTForImageClassification, folder: Path, num_steps: int | None = None, solver: str | None = None
) -> list[Path]:
    """embed.onnx, field.onnx (field_0.onnx, … when there are several) and head.onnx, for solvers of one's own.

    The field returns F and G apart, so that splitting methods can be driven too; the metadata's `flow.steps` lists
    (field, step size) of every step of the model's own grid.
    """
    steps, solver = chosen_flow(model, num_steps, solver)
    network, notes = plain_copy(model), metadata(model, steps, solver)
    images = example(network)
    tokens = network.odevit.embed(images)
    count = len(network.odevit.fields)
    fields = {f"field_{i}.onnx" if count > 1 else "field.onnx": Field(network, i) for i in range(count)}
    write_graph(Embed(network), (images,), folder / "embed.onnx", ["images"], ["state"], notes)
    for name, field in fields.items():
        write_graph(field, (tokens,), folder / name, ["state"], ["F", "G"], notes)
    write_graph(Head(network), (tokens,), folder / "head.onnx", ["state"], ["logits"], notes)
    return [folder / name for name in ("embed.onnx", *fields, "head.onnx")]


def write_pt2(
    model: OdeViTForImageClassification, file: Path, num_steps: int | None = None, solver: str | None = None
) -> None:
    """A torch.export program; `torch.export.load(file, extra_files={"labels": ""})` reads it and its metadata."""
    steps, solver = chosen_flow(model, num_steps, solver)
    network = plain_copy(model)
    images = example(network)
    with quiet():
        program = torch.export.export(
            Classifier(network, steps, solver), (images,), dynamic_shapes={"images": {0: torch.export.Dim("batch")}}
        )
        for node in program.graph.nodes:
            node.meta.pop("stack_trace", None)  # paths of this machine
        buffer = io.BytesIO()
        torch.export.save(program, buffer, extra_files=metadata(model, steps, solver))
    write_file(file, buffer.getvalue())


def quantize_onnx(source: Path, target: Path) -> None:
    """Weights of matrix products in 8 bits, one scale per column; activations are quantised as they come."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    written = target.with_name(f"{TEMPORARY}{target.name}")
    with quiet():
        quantize_dynamic(
            source, written, weight_type=QuantType.QInt8, per_channel=True, op_types_to_quantize=["MatMul", "Gemm"]
        )
    sync(written)
    os.replace(written, target)


def onnx_session(file: Path) -> Any:
    """The file in onnxruntime, on one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def onnx_runner(file: Path) -> Run:
    session = onnx_session(file)
    name = session.get_inputs()[0].name
    return lambda images: torch.from_numpy(session.run(None, {name: images.numpy()})[0])


def pt2_runner(file: Path) -> Run:
    return torch.export.load(file).module()


def parts_runner(model: OdeViTForImageClassification, folder: Path, num_steps: int | None, solver: str | None) -> Run:
    """The graphs of `write_parts`, driven by odevit's own solver."""
    steps, solver = chosen_flow(model, num_steps, solver)
    count = model.config.num_fields
    fields = [_GraphField(folder / (f"field_{i}.onnx" if count > 1 else "field.onnx")) for i in range(count)]
    embed, head = onnx_runner(folder / "embed.onnx"), onnx_runner(folder / "head.onnx")
    horizon = float(model.config.horizon)
    return lambda images: head(solve(fields, embed(images), num_steps=steps, solver=solver, horizon=horizon).xs[-1])


class _GraphField:
    """field.onnx as a field that `solve` takes."""

    def __init__(self, file: Path):
        self.session = onnx_session(file)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        f, g = self.session.run(None, {"state": x.numpy()})
        return torch.from_numpy(f), torch.from_numpy(g)

    def F(self, x: Tensor) -> Tensor:
        return self.parts(x)[0]

    def G(self, x: Tensor) -> Tensor:
        return self.parts(x)[1]

    def __call__(self, x: Tensor) -> Tensor:
        f, g = self.parts(x)
        return f + g


def eager_runner(model: OdeViTForImageClassification, num_steps: int | None, solver: str | None) -> Run:
    steps, solver = chosen_flow(model, num_steps, solver)
    return Classifier(plain_copy(model), steps, solver)


@torch.no_grad()
def logits_of(run: Run, images: Tensor, batches: Sequence[int] = (1, 64)) -> Tensor:
    """(N, classes): the first batch has the first size, all others the second, so that both must work."""
    sizes = [batches[0], *[batches[1]] * (max(0, len(images) - batches[0]) // batches[1])]
    parts = images.split([*sizes, len(images) - sum(sizes)])
    return torch.cat([run(part) for part in parts if len(part)])


def compare(ours: Tensor, theirs: Tensor, labels: Tensor | None = None) -> dict[str, float | int]:
    """Largest difference of logits (N, classes), share of equal answers, and both accuracies where labels are known."""
    result: dict[str, float | int] = {
        "images": len(ours),
        "largest_difference": float((ours - theirs).abs().max()),
        "agreement": float((ours.argmax(-1) == theirs.argmax(-1)).double().mean()),
    }
    if labels is not None:
        result["accuracy"] = float((ours.argmax(-1) == labels).double().mean())
        result["accuracy_exported"] = float((theirs.argmax(-1) == labels).double().mean())
    return result


def example(model: OdeViTForImageClassification) -> Tensor:
    """Two images: a batch of one would be taken for a constant."""
    config = model.config
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, config.num_channels, config.image_size, config.image_size, generator=generator)


def write_graph(
    module: nn.Module,
    examples: tuple[Tensor, ...],
    file: Path,
    inputs: list[str],
    outputs: list[str],
    notes: Mapping[str, str],
) -> None:
    """One ONNX file of a module, for any batch size; notes become its metadata."""
    batch = torch.export.Dim("batch")
    with quiet():
        program: Any = torch.onnx.export(
            module.eval(),
            examples,
            dynamo=True,
            input_names=inputs,
            output_names=outputs,
            dynamic_shapes=tuple({0: batch} for _ in examples),
            verbose=False,
        )
    save_clean(program.model, file, notes)


def save_clean(graph: Any, file: Path, notes: Mapping[str, str]) -> None:
    """Write an onnx_ir model with every weight once (folding made a copy for each step) and no traces of source files.

    Intermediate shapes are left out: readers infer them, and quantisation contradicts stale ones.
    """
    import onnx_ir
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass, DeduplicateInitializersPass

    DeduplicateInitializersPass(size_limit=2**62)(graph)
    ClearMetadataAndDocStringPass()(graph)
    graph.metadata_props.update(notes)
    proto = onnx_ir.to_proto(graph)
    del proto.graph.value_info[:]
    write_file(file, proto.SerializeToString())


@contextmanager
def quiet() -> Iterator[None]:
    """Without the exporters' remarks; their errors still come through."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir", "root")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
